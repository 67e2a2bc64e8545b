"""The texts that repro scripts are put together from: `$name` is filled in."""

from __future__ import annotations

SHARES = {
    "token-mean": "(token_loss(out, batch) * batch.loss_mask).sum() * "
    "(len(RANKS) / sum(n for held in RANKS for _, _, n in held))",
    "token-sum": "(token_loss(out, batch) * batch.loss_mask).sum() * float(len(RANKS))",
    "seq-mean-token-sum": "(token_loss(out, batch) * batch.loss_mask).sum() * "
    "(len(RANKS) / sum(n > 0 for held in RANKS for _, _, n in held))",
    "seq-mean-token-mean": "(token_loss(out, batch) * batch.loss_mask).sum() / max(1, batch.loss_mask.sum()) * "
    "(len(RANKS) / sum(n > 0 for held in RANKS for _, _, n in held))",
}
"""A micro-batch's share of the loss, times the ranks that FSDP averages over."""

DIM_PART = "full.narrow(at.dim, at.start, at.length)"
FLAT_PART = 'full.flatten()[at.start : at.stop] if hasattr(at, "stop") else full'

REFERENCE = """\
def gradients(rank):  # name, this rank's part, how to take that part of a full tensor
$plant    config = dict(strategy="$strategy", reshard_after_forward=RESHARD, loss_agg_mode="$mode", mixed_precision=MIXED,
        use_no_sync_for_gradient_accumulation=DEFERRED, model_dtype=str(STORAGE).removeprefix("torch."),
        wrap_policy=dict(transformer_layer_cls_to_wrap="Block"))
    engine = reference.FsdpEngine(build(), reference.from_mapping(reference.EngineConfig, config),
        reference.OptimizerConfig(), device=torch.device("cpu"), shape=MESH)
    with engine.mode("train"):
        engine.forward_backward(Batch(RANKS[rank]), token_loss)
        return [(s.name, s.data, lambda full, at=s.placement: $part) for s in engine.gradients()]
class Batch(list):
    lengths, loss_tokens = (property(lambda held, i=i: tuple(s[i] for s in held)) for i in (1, 2))
    select = lambda held, indices: micro_batch(*held[indices[0]])"""

FSDP2 = """\
def gradients(rank):  # name, full gradient, how to take that part of a full tensor
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard")[-len(MESH) :])
    options = dict(mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**{k: getattr(torch, v) for k, v in MIXED.items()}))
    model = build()
    for unit in [m for m in model.modules() if type(m) is Block]:
        fsdp.fully_shard(unit, reshard_after_forward=RESHARD, **options)
    fsdp.fully_shard(model, reshard_after_forward=None if RESHARD else False, **options)
    for k, sequence in enumerate(RANKS[rank]):
        model.set_requires_gradient_sync(not DEFERRED or k == len(RANKS[rank]) - 1)
        batch = micro_batch(*sequence)
        share(model(**batch.inputs), batch).backward()
    return [(n, q.grad if q.grad is None else q.grad.full_tensor(), lambda x: x) for n, q in model.named_parameters()]"""

FSDP1 = """\
def gradients(rank):  # name, full gradient, how to take that part of a full tensor
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard")[-len(MESH) :])
    name = [["SHARD_GRAD_OP", "FULL_SHARD"], ["_HYBRID_SHARD_ZERO2", "HYBRID_SHARD"]][len(MESH) - 1][RESHARD]
    policy = fsdp.MixedPrecision(cast_root_forward_inputs=True, cast_forward_inputs=True,
        **{k: getattr(torch, v) for k, v in MIXED.items()}) if MIXED else None
    model = fsdp.FullyShardedDataParallel(build(), device_mesh=mesh, sharding_strategy=fsdp.ShardingStrategy[name],
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Block}), mixed_precision=policy,
        device_id=torch.device("cpu"), use_orig_params=True)
    for k, sequence in enumerate(RANKS[rank]):
        batch, waits = micro_batch(*sequence), DEFERRED and k < len(RANKS[rank]) - 1
        with model.no_sync() if waits else contextlib.nullcontext():
            share(model(**batch.inputs), batch).backward()
    with model.summon_full_params(model, with_grads=True):
        return [(n.replace("_fsdp_wrapped_module.", ""), q.grad if q.grad is None else q.grad.clone(), lambda x: x)
            for n, q in model.named_parameters()]"""

LOCAL = """\
def local(sequence):  # gradients of one micro-batch, in one process and without a wrapper
    model, batch = build().to(COMPUTE), micro_batch(*sequence)
    share(model($inputs), batch).backward()
    return {name: (0 * q if q.grad is None else q.grad).to(KEPT) for name, q in model.named_parameters()}
"""

COMPARE = """\
grads = [[local(sequence) for sequence in held] for held in RANKS]
        for name, got, part in gradients(rank):
            terms = $terms  # what is reduced
            want, allowed = sum(terms) / world, sum(map(abs, terms)) / world * RELATIVE + ABSOLUTE
            got = 0 * want if got is None else got.double()
            if got.shape != want.shape:
                tell(1, f"gradient {name}, rank {rank}: {list(got.shape)}, should be {list(want.shape)}", store)
            wrong = ~((got - want).abs() <= allowed)
            if wrong.any():
                tell(1, f"gradient {name}, rank {rank}: got {got[wrong][0]}, should be {want[wrong][0]}", store)
"""

SCRIPT = '''\
"""$title.
    python $name [control]    or    $run [control]
$told
One line; exit 0: FIXED, 1: FAILED, 2: ERROR (could not run). Seen with $versions:
$seen
"""
import contextlib, os, sys, tempfile, threading
from types import SimpleNamespace as Data
def tell(code, text, store=None):  # one rank prints, all end
    if store is None or store.add("told", 1) == 1:
        print(["FIXED", "FAILED", "ERROR"][code], text, flush=True)
    os._exit(code)
sys.excepthook = lambda kind, error, trace: tell(2, repr(error))
$imports
$names  # per rank its micro-batches: (seed, length, tokens with loss)$control
$model
$data
def share(out, batch):  # of the loss, times the ranks that FSDP averages over
    return $share
$local$engine
def main(rank, url):
    store, rank, world = next(dist.rendezvous(url, rank, len(RANKS)))
    threading.Timer($deadline, tell, ($hang, "hang: no end in $deadline s", store)).start()
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        $compare
        dist.barrier()
    except Exception as error:
        tell($error, f"rank {rank}: {error!r}", store)
    tell(0, "$fixed", store)
if "RANK" in os.environ:
    main(int(os.environ["RANK"]), "env://")
url = "file://" + tempfile.mktemp()
ranks = [os.fork() or main(rank, url) for rank in range(len(RANKS))]
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
sys.exit(1 if 1 in codes else 2 if any(codes) else 0)
'''
