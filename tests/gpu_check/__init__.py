"""What a run on GPUs must show, in one table: `python -m tests.gpu_check`."""
