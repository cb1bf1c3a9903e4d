"""Train in several processes: torchrun --nproc-per-node 2 train.py …

torchrun starts the processes, which are called ranks. Each has a share of every batch. The first
one, rank 0, prints, saves and measures for all. If one of them dies, torchrun stops the others. The
same command goes on then. With `--max-restarts 2` torchrun itself starts it again, up to twice.
"""

import contextlib
import datetime
import os
import sys

import torch
from torch import distributed

COUNT = 1  # of ranks
if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets this, and the other variables below
    COUNT = int(os.environ["WORLD_SIZE"])
DEVICE = "cpu"
if torch.cuda.is_available():
    DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # each process has a GPU of its own


def name():
    """Name this process, if it is not the first one, at the beginning of a message."""
    rank = os.environ.get("RANK", "0")
    if COUNT == 1 or rank == "0":
        return ""
    return f"rank {rank}: "


def is_first():
    """Whether this process is the one that prints and saves."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


@contextlib.contextmanager
def joined():
    """Join the other processes, if torchrun has started this one. All but the first are quiet."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(DEVICE)
    # By default a rank waits for ten minutes, in which rank 0 may still read images.
    wait = datetime.timedelta(hours=2)
    store, rank, size = next(distributed.rendezvous("env://", timeout=wait))
    # After a restart the store still has what earlier ranks wrote. So each start has a prefix.
    store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    distributed.init_process_group(store=store, rank=rank, world_size=size, timeout=wait)
    out, error = sys.stdout, sys.stderr
    if not is_first():
        out = error = open(os.devnull, "w")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        print(f"{COUNT} processes share each batch. On a CPU BatchNorm sees one share at a time.")
        yield
    distributed.destroy_process_group()


@contextlib.contextmanager
def first_before_others():
    """Let rank 0 do something, such as a download, before the others do it."""
    if not is_first():
        distributed.barrier()
    try:
        yield
    finally:  # if rank 0 fails here, the others have to go on, and fail in the same way
        if is_first() and distributed.is_initialized():
            distributed.barrier()
