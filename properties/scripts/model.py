"""The model, the data and the loss of a case as source, in plain torch and as short as can be."""

from __future__ import annotations

from fsdp_engine.contract.case import Case


def model_source(case: Case) -> str:
    """`Block` and `build()`: the shapes of the case, weights of the script's own."""
    model = case.model
    # Not the case's own ReLU: what it switches off on one rank hides how gradients add up.
    smooth = "nn.ReLU()" if case.exact else "nn.SiLU()"
    linear = f"nn.Linear({{}}, {{}}, bias={model.bias})".format
    if model.family == "linear":
        head = ["class Block(nn.Sequential): pass  # a unit of FSDP"]
        parts = f"{linear(model.width, model.width)}, {smooth}"
    else:
        head = ["class Block(nn.Sequential):  # a unit of FSDP"]
        head += ["    forward = lambda self, x: x + nn.Sequential.forward(self, x)"]
        parts = f"{linear(model.width, model.hidden)}, {smooth}, "
        parts += linear(model.hidden, model.width)
    embed = f"nn.Embedding({model.vocab}, {model.width}), " if model.takes_tokens else ""
    lines = [
        *head,
        "def build():",
        "    torch.manual_seed(0)",
    ]
    whole = f"nn.Sequential({embed}*(Block({parts}) for _ in range({model.units})), "
    whole += f"{linear(model.width, model.vocab)})"
    if not (model.tied or model.lora_rank or case.exact or model.frozen != "none"):
        return "\n".join([*lines, f"    return {whole}.to(STORAGE)"])
    lines.append(f"    model = {whole}")
    if model.tied:
        lines.append("    model[-1].weight = model[0].weight")
    if model.frozen == "first_unit":
        lines.append(f"    model[{int(model.takes_tokens)}].requires_grad_(False)")
    if model.lora_rank:
        lines += [
            f"    config = peft.LoraConfig(r={model.lora_rank}, lora_alpha={model.lora_alpha}, "
            f'target_modules=r"{_targets(case)}", init_lora_weights=False)',
            "    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)",
        ]
    if case.exact:
        lines += [
            "    for q in model.parameters():",
            "        q.data = torch.randint(-1, 2, q.shape).float()",
        ]
    return "\n".join([*lines, "    return model.to(STORAGE)"])


def _targets(case: Case) -> str:
    first = int(case.model.takes_tokens)
    blocks = "|".join(str(first + index) for index in range(case.model.units))
    return rf".*\b({blocks})\.(0|2)"


def data_source(case: Case) -> str:
    """`micro_batch` and `token_loss`."""
    vocab, cast = case.model.vocab, f".{wide(case)}()"

    def drawn(size: int) -> str:
        if case.exact:
            return f"torch.randint(-2, 3, (1, length, {size}), generator=g){cast}"
        return f"torch.randn(1, length, {size}, generator=g){cast}"

    tokens = f"torch.randint({vocab}, (1, length), generator=g)"
    inputs = tokens if case.model.takes_tokens else drawn(case.model.width)
    if case.loss == "cross_entropy":
        targets = tokens
        losses = f"nn.functional.cross_entropy(out[0]{cast}, batch.targets[0], "
        losses += 'reduction="none")[None]'
    else:
        targets = drawn(vocab)
        losses = f"(out{cast} - batch.targets).square().sum(-1) / 2"
    return "\n".join(
        [
            "def micro_batch(seed, length, n):",
            "    g = torch.Generator().manual_seed(seed)",
            f"    x, y = {inputs}, {targets}",
            "    return Data(inputs={'input': x}, targets=y, "
            "loss_mask=torch.arange(length)[None] < n, to=lambda _: micro_batch(seed, length, n))",
            "def token_loss(out, batch):",
            f"    return {losses}",
        ]
    )


def wide(case: Case) -> str:
    """The cast to the dtype of the losses."""
    return "double" if case.dtypes.compute == "float64" else "float"
