"""Data-parallel training with PyTorch in one file: a reference to run, to copy from and to read.

    bash run.sh                                  # a process per GPU (NCCL); without a GPU two (gloo)
    python ddp_reference.py --nproc-per-node 4   # the same without run.sh, on four processes
    torchrun --standalone --nproc-per-node=4 ddp_reference.py
    torchrun --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 --master-port=29500 \\
             --nproc-per-node=8 ddp_reference.py # on the first of two machines; on the other --node-rank=1

From top to bottom: which samples a rank reads, what a sample is, the net, training and evaluation,
checkpoints, one process of the job, the launch; beside this core tar shards and the sampler shown at
work; the command line. test_ddp_reference.py shows that each part does what its docstring says.
"""

import argparse
import contextlib
import glob
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import operator
import os
import re
import signal
import socket
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group exists: see the end of worker()
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate,
                              get_worker_info)


# Which samples a rank reads


class DistributedSampler(Sampler):
    """The indices that one of `num_replicas` ranks reads in an epoch.

    The epoch's order is a permutation of the data set that depends on (seed, epoch) alone, so every
    rank works out the same one and they need not talk. The ranks read it in stripes: rank r takes the
    positions r, r + W, r + 2W, ... (W = num_replicas). So after k samples on each rank exactly the
    first k * W positions are gone, whatever W is: one number, `start`, says how far all ranks
    together have come, and any number of ranks can go on from there.

    A drop-in for torch.utils.data.distributed.DistributedSampler: the same arguments, attributes and
    indices. Beyond it: `pad`, `start`, a warning where set_epoch was forgotten, and 4 bytes a sample
    where torch holds a list of Python ints (pytorch/pytorch#45427).

    dataset: anything with a length; only the length is used.
    num_replicas, rank: default to those of the process group.
    shuffle: a new order each epoch, from seed + epoch; otherwise 0, 1, 2, ...
    drop_last: leave out the last samples of the order that not every rank can have one of.
    pad: otherwise repeat samples from the start of the order until all ranks have equally many, which
        training needs: every step is a collective. With pad=False and drop_last=False each sample is
        read exactly once over all ranks, and some ranks read one less: for evaluation
        (pytorch/pytorch#25162).

    After each set_epoch, num_samples (also len()) is how many indices this rank gets, total_size how
    many all ranks get. Raises ValueError for a number out of range, TypeError for a data set without
    a length.
    """

    def __init__(self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False,
                 *, pad=True):
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}, but must be at least 1")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank is {rank}, but must be in [0, {num_replicas})")
        try:
            len(dataset)
        except TypeError:
            raise TypeError(f"{type(dataset).__name__} has no length, so its samples cannot be dealt out "
                            "by index: stream it, as an IterableDataset that splits itself by rank") from None
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.pad = shuffle, seed, drop_last, pad
        self.set_epoch(0)

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order; call it before each epoch.

        start: how many samples of this order all ranks together have already read. Iteration goes on
        behind them, striped anew over the present num_replicas.
        """
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"start is {start}, but must be in [0, {len(self.dataset)}]")
        remaining = len(self.dataset) - start
        if self.drop_last:
            self.total_size = remaining // self.num_replicas * self.num_replicas
        elif self.pad:
            self.total_size = math.ceil(remaining / self.num_replicas) * self.num_replicas
        else:
            self.total_size = remaining
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.epoch, self.start, self._passes = epoch, start, 0

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        n = len(self.dataset)
        # Positions in the epoch's order; those from n on are padding and wrap around to its start.
        positions = range(self.start + self.rank, self.start + self.total_size, self.num_replicas)
        if not self.shuffle:
            return (position % n for position in positions)
        self._passes += 1
        if self._passes == 2:  # torch stays silent and trains on one order for ever: pytorch/pytorch#11324
            warnings.warn(f"second pass over the order of epoch {self.epoch}: call set_epoch(epoch) "
                          "before each epoch, or every epoch has the same order", stacklevel=2)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(n, generator=generator, dtype=torch.int32 if n < 2**31 else torch.int64)
        # contiguous() copies this rank's part, so that the whole order is freed on return.
        mine = order[positions.start:positions.stop:positions.step].contiguous()
        padding = [int(order[position % n]) for position in positions[len(mine):]]
        # A chunk at a time: one list of all the indices would take 36 bytes for each of them.
        chunks = (chunk.tolist() for chunk in mine.split(8192))
        return itertools.chain(itertools.chain.from_iterable(chunks), padding)


# What a sample is


class SyntheticDataset(Dataset):
    """`num_samples` random signals with a label at every position.

    Item i is (x, y): x float32 (3, length), standard normal; y int64 (length,) in {0, 1, 2}, the
    channel of x whose sum over the position and its two neighbours is largest (outside the signal
    x is 0), which a convolution of width 3 can learn.

    An item depends on (seed, i) alone, so it is the same on every rank, in every loader worker and
    in any order. Drawing from NumPy's global generator instead gives every worker the same numbers:
    each is a copy of one process (pytorch/pytorch#5059).
    """

    def __init__(self, num_samples=100, length=10000, seed=0):
        self.num_samples, self.length, self.seed = num_samples, length, seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is outside [0, {self.num_samples})")
        generator = np.random.default_rng((self.seed, index))
        x = generator.standard_normal((3, self.length), dtype=np.float32)
        moving_sum = x.copy()
        moving_sum[:, 1:] += x[:, :-1]
        moving_sum[:, :-1] += x[:, 1:]
        return torch.from_numpy(x), torch.from_numpy(moving_sum.argmax(axis=0))


# The net


class ConvNet(nn.Module):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, num_classes, L)."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.conv1 = nn.Conv1d(3, 16, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm1d(16)
        self.conv2 = nn.Conv1d(16, 32, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm1d(32)
        self.conv3 = nn.Conv1d(32, num_classes, kernel_size=3, padding=1)
        self.bn3 = nn.BatchNorm1d(num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))  # no ReLU: cross entropy takes logits of either sign


# Training and evaluation


def tally(loss, logits, y):
    """float64 (3,) on the device: sum of the losses, correct positions, positions of one batch.

    Sums, because sums can be added up over batches and ranks of any size; means can't. And a tensor,
    because .item() would make the host wait for the device in every step.
    """
    positions = loss.new_full((), y.numel(), dtype=torch.float64)
    return torch.stack([loss.detach() * positions, (logits.max(dim=1).indices == y).sum(), positions])


def train_steps(model, loader, optimizer, device, sums, accumulate=1, amp=False):
    """Train on all that the loader gives; before each step, and after the last, yield the samples read so far.

    model: wrapped in DistributedDataParallel or not; all ranks must get equally many batches.
    sums: float64 on the device; the tally of each batch is added to the first three. The fourth counts
        the steps until the sum of the losses stopped being finite.
    accumulate: batches a step. Its gradient is the mean over them, also in the last, shorter window.
    amp: run the net under bfloat16 autocast.
    """
    model.train()
    batches, samples = iter(loader), 0
    yield samples
    while window := list(itertools.islice(batches, accumulate)):
        for i, (x, y) in enumerate(window, 1):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            # The ranks add up their gradients during backward: once a step is enough.
            no_sync = isinstance(model, DistributedDataParallel) and i < len(window)
            with model.no_sync() if no_sync else contextlib.nullcontext():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                    logits = model(x)
                    loss = F.cross_entropy(logits, y)
                (loss / len(window)).backward()
            sums[:3] += tally(loss, logits, y)
            samples += len(x)
        optimizer.step()
        optimizer.zero_grad()
        sums[3] += sums[0].isfinite()
        yield samples


@torch.inference_mode()
def evaluate(model, loader, device):
    """(loss, accuracy) over all that the loaders of all ranks give, the same on every rank.

    Sums are reduced, not means, so with a sampler that neither pads nor drops the result does not
    depend on the number of ranks. Leaves the model in eval mode.
    """
    # The bare module: the wrapper's first forward broadcasts the buffers, and a rank without a batch
    # would not join in.
    model = model.module if isinstance(model, DistributedDataParallel) else model
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        logits = model(x)
        sums += tally(F.cross_entropy(logits, y), logits, y)
    loss, correct, positions = sum_over_ranks(sums)
    return loss / positions, correct / positions


def sum_over_ranks(values):
    """The sum of a tensor (n,) over all ranks, as a list of numbers. The host waits for the device."""
    values = values.clone()
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()


def digest(module):
    """SHA-256 over all parameters and buffers: equal digests, equal models."""
    sha256 = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha256.update(name.encode())
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


# Checkpoints


def save_checkpoint(path, state):
    """Write a checkpoint so that at every moment `path` is either the old one or the new one, whole.

    Raises if it cannot be written, and the old one is intact.
    """
    folder, name = os.path.split(os.path.realpath(path))
    temporary = os.path.join(folder, f".{name}.new")  # always the same: what a kill leaves is reused
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the data before the name: a crash must not leave an empty file
        os.replace(temporary, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # and now the name
    finally:
        os.close(directory)


def load_checkpoint(path, job, module):
    """The state that save_checkpoint wrote, its tensors on the CPU; None if there is no file.

    job: a dict of what has to be the same to go on.  module: so have its parameters' shapes.
    Raises ValueError, naming the file and what is wrong with it.
    """
    def identity(job, module_state):
        return job | {name: list(tensor.shape) for name, tensor in module_state.items()}
    try:
        # Without map_location every rank loads onto rank 0's GPU. From the CPU load_state_dict moves all to
        # this rank's device but Adam's step counters, which on a GPU would make each step wait for it.
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = identity(state["job"], state["module"])
    except FileNotFoundError:
        return None
    except (IsADirectoryError, PermissionError) as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # which one a damaged file raises depends on where the damage is
        raise ValueError(f"{path} is damaged or not a checkpoint ({type(error).__name__})") from error
    here = identity(job, module.state_dict())
    for name in here | saved:
        if here.get(name) != saved.get(name):
            raise ValueError(f"{path} is the checkpoint of another job: its {name} is {saved.get(name)}, "
                             f"but here it is {here.get(name)}")
    return state


def resume(args, device, module, optimizer):
    """Load the job's checkpoint, if there is one: (epoch, samples of it already read, their sums)."""
    epoch, samples, sums = 0, 0, [0, 0, 0]
    if args.checkpoint and (state := load_checkpoint(args.checkpoint, args.job, module)):
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = args.lr  # as the command line says now, not as it said then
        epoch, samples, sums = state["epoch"], state["samples"], state["sums"]
    # No rank goes on before all have loaded, nor from elsewhere than the others.
    total = sum_over_ranks(torch.tensor([epoch, samples, 1], dtype=torch.float64, device=device))
    if total != [total[2] * epoch, total[2] * samples, total[2]]:
        raise RuntimeError(f"the ranks find different checkpoints: {args.checkpoint} must be one file for all")
    return epoch, samples, sums


# One process of the job


def total_over_ranks(sums, epoch):
    """The sums of train_steps over all ranks, as a list. Raises FloatingPointError if the loss is not finite."""
    totals = sum_over_ranks(sums)
    if not math.isfinite(totals[0]):
        steps = sums[3].clone()  # of the rank where it began: the others follow, by the shared gradient
        if dist.is_initialized():
            dist.all_reduce(steps, dist.ReduceOp.MIN)
        raise FloatingPointError(f"the loss is not finite in epoch {epoch}, step {int(steps) + 1}: lower --lr?")
    return totals


def start_loader_worker(worker):
    """In a loader worker: leave signals to its rank, and end with it, however that ends.

    A worker started by a fork server is not its rank's child, so PyTorch's own watchdog does not see
    the rank go.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def end_with_rank():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=end_with_rank, daemon=True).start()


def make_loaders(args, device, rank, world_size):
    """(training loader, validation loader, the training loader's set_epoch) of one rank."""
    pin = device.type == "cuda"
    # DDP's documentation: not fork, which copies a process with the threads of CUDA and NCCL in mid-flight.
    # The fork server is a clean process that imports torch once; spawn would in every worker.
    workers = dict(multiprocessing_context="forkserver", worker_init_fn=start_loader_worker,
                   persistent_workers=True) if args.num_workers else {}
    multiprocessing.set_forkserver_preload(["torch.utils.data", "torch.distributed.nn"])
    # A generator of its own: the seeds of the loader workers differ between ranks, and drawing them leaves
    # PyTorch's own generator, which seed_step has set, as it is.
    options = dict(batch_size=args.batch_size, num_workers=args.num_workers,
                   generator=torch.Generator().manual_seed(args.seed + rank), **workers)
    share = dict(num_replicas=world_size, rank=rank)
    if args.shards:
        stream = ShardStream(args.shards, args.num_samples, seed=args.seed, **share)
        loader = Remix(DataLoader(stream, **options), args.batch_size, max(1, 4 * args.batch_size * args.num_workers),
                       args.drop_last, pin)
        val_stream = ShardStream(args.val_shards, None, resampled=False, shuffle_buffer=1, **share)
        return loader, DataLoader(val_stream, pin_memory=pin, **options), stream.set_epoch
    train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
    val_set = SyntheticDataset(25, args.length, args.seed + 1)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=args.drop_last, **share)
    val_sampler = DistributedSampler(val_set, shuffle=False, pad=False, **share)
    loader = DataLoader(train_set, sampler=sampler, drop_last=args.drop_last, pin_memory=pin, **options)
    return loader, DataLoader(val_set, sampler=val_sampler, pin_memory=pin, **options), sampler.set_epoch


def wrap(module, parallel, device):
    """The module under DistributedDataParallel ("ddp"), nn.DataParallel ("dp", on GPUs) or nothing.

    Under the first, BatchNorm normalises each rank's batch by its own statistics (SyncBatchNorm: by
    those of all); the running ones are rank 0's, which the wrapper broadcasts before a step.
    """
    if parallel == "ddp":
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None,
                                       gradient_as_bucket_view=True)
    return nn.DataParallel(module) if parallel == "dp" and device.type == "cuda" else module


def settle_buckets(model, dataset, device):
    """Have DDP lay its gradients into buckets for the last time, before the first step.

    After its first backward DDP rebuilds the buckets in the order in which the gradients came, and an
    all-reduce over three or more ranks adds up in an order that depends on the place in the bucket. A
    resumed job would begin with the first layout where the undisturbed one has long left it, and drift
    from it in the last bit. Eval mode, so that no buffer changes; the gradients are thrown away.
    """
    x, y = default_collate([next(iter(dataset))])
    model.eval()
    F.cross_entropy(model(x.to(device)), y.to(device)).backward()
    model.zero_grad()


def seed_step(seed, epoch, samples, rank):
    """Seed PyTorch's generators for the step after `samples` samples of the epoch: about 20 microseconds.

    So dropout, and augmentation without loader workers, differ between ranks and steps, and are the
    same after resuming. What a loader worker draws from its running state is not: draw it from
    (seed, index), as SyntheticDataset does.
    """
    torch.manual_seed(int(np.random.SeedSequence((seed, epoch, samples, rank)).generate_state(1, np.uint64)[0]))


def train(args, device, rank, world_size):
    """What a single process would do, and what makes it one of `world_size`: train, evaluate, report.

    Returns the trained module, or None if SIGTERM ended the training early.
    """
    terminated = []
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    loader, val_loader, set_epoch = make_loaders(args, device, rank, world_size)
    torch.manual_seed(args.seed)
    module = ConvNet().to(device)
    if args.sync_bn:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    first_epoch, samples, saved_sums = resume(args, device, module, optimizer)
    model = wrap(module, args.parallel, device)
    if args.parallel == "ddp":
        settle_buckets(model, loader.dataset, device)

    def say(line, end="\n"):
        if rank == 0:
            print(line, end=end, flush=True)

    def save(epoch, samples, sums):
        if rank == 0 and args.checkpoint:
            if not all(tensor.isfinite().all() for tensor in module.state_dict().values()):
                raise FloatingPointError(f"the net is not finite in epoch {epoch}, after sample {samples}")
            save_checkpoint(args.checkpoint, dict(
                job=args.job, module=module.state_dict(), optimizer=optimizer.state_dict(),
                epoch=epoch, samples=samples, sums=sums))

    backend = args.backend if args.parallel == "ddp" else f"parallel {args.parallel}"
    say(f"{backend}, world size {world_size}, {device.type}, torch {torch.__version__}")
    if args.parallel == "dp" and model is module:
        say("DataParallel needs GPUs: this is the bare net in one process")
    if first_epoch >= args.epochs:
        say(f"{args.checkpoint} holds {first_epoch} finished epochs, --epochs is {args.epochs}: nothing to do")
    elif first_epoch or samples:
        say(f"resuming from {args.checkpoint}: epoch {first_epoch}, sample {samples} of {args.num_samples}")
    clear_line = "\r\033[K" if sys.stdout.isatty() else ""
    for epoch in range(first_epoch, args.epochs):
        start, read, begin, rate = samples, 0, time.perf_counter(), 0.0
        set_epoch(epoch, start)
        step = math.ceil(start / (args.batch_size * world_size * args.accumulate))
        last_step = step + math.ceil(len(loader) / args.accumulate)
        loss, correct, positions = saved_sums
        # Loss, correct positions, positions, finite steps (see train_steps), whether SIGTERM has come.
        sums = torch.tensor([*(saved_sums if rank == 0 else [0, 0, 0]), step, 0], dtype=torch.float64,
                            device=device)
        for read in train_steps(model, loader, optimizer, device, sums, args.accumulate, args.amp):
            samples = min(start + read * world_size, args.num_samples)
            seed_step(args.seed, epoch, samples, rank)
            if not read:
                continue
            step += 1
            due = args.checkpoint_every and step % args.checkpoint_every == 0
            if step % args.log_interval and step < last_step and not due:
                continue
            sums[4] = bool(terminated)  # rides along with the sums: all ranks see it at the same step
            loss, correct, positions, _, stop = total_over_ranks(sums, epoch)
            rate = read * world_size / (time.perf_counter() - begin)
            if clear_line:
                say(f"{clear_line}epoch {epoch} step {step}/{last_step} | loss {loss / positions:.4f} "
                    f"accuracy {correct / positions:.3f} | {rate:.1f} samples/s", end="")
            if due or stop:
                save(epoch, samples, [loss, correct, positions])
            if stop:
                say(f"{clear_line}stopped by SIGTERM: epoch {epoch}, sample {samples} of {args.num_samples}")
                sum_over_ranks(sums)  # stay until rank 0 has written: the first to leave ends the job
                return None
        if args.parallel == "ddp":
            for buffer in module.buffers():  # all ranks evaluate, and digest, rank 0's running statistics
                dist.broadcast(buffer, src=0)
        val_loss, val_accuracy = evaluate(model, val_loader, device)
        if not math.isfinite(val_loss):
            raise FloatingPointError(f"the validation loss is not finite after epoch {epoch}: lower --lr?")
        say(f"{clear_line}epoch {epoch} | loss {loss / positions:.4f} accuracy {correct / positions:.3f} | "
            f"val_loss {val_loss:.4f} val_accuracy {val_accuracy:.3f} | {rate:.1f} samples/s")
        samples, saved_sums = 0, [0, 0, 0]
        save(epoch + 1, samples, saved_sums)
    say(f"parameters sha256 {digest(module)}")
    return module


def local_device(local_rank):
    """The local_rank-th GPU of this machine, or the CPU. The global rank counts over all machines."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def worker(local_rank, args, store_address=None):
    """One process of the job: its threads, its device, its process group; then train.

    local_rank: which process of this machine it is; torchrun gives the other numbers in the environment.
    store_address: (host, port) of the TCPStore through which the ranks find each other, where the
        parent holds one; without it, they are found as torchrun says.
    """
    # Ctrl-C reaches every process of the job: end at once, without a traceback. (launch() has blocked it.)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if store_address:
        os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(args.nproc_per_node),
                          LOCAL_WORLD_SIZE=str(args.nproc_per_node))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_world_size == world_size:  # one machine: listen on nothing but the loopback address
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1; without it each process takes all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))
    store = None
    try:
        device = local_device(local_rank)
        if store_address:
            store = dist.TCPStore(*store_address, is_master=False)
        else:
            store = next(dist.rendezvous("env://", rank, world_size))[0]
            # torchrun keeps its store over a restart, and in it the addresses of ranks that are gone
            # (pytorch/pytorch#135712). Not over several machines: each counts its own restarts (#108158).
            if local_world_size == world_size:
                store = dist.PrefixStore("restart " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size,
                                device_id=device if args.backend == "nccl" else None)
        finished = train(args, device, rank, world_size) is not None
    except Exception:
        # The first rank to fail says why; the others fail because it has left.
        with contextlib.suppress(Exception):  # the store may have gone with the process that held it
            if store is not None and store.add("failed", 1) > 1:
                os._exit(1)
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        # To destroy the group now would wait for ranks that wait for this one (pytorch/torchtitan#1342).
        os._exit(1)
    # A group that something still holds aborts the interpreter at exit (pytorch/pytorch#190489): the model
    # in train()'s frame, which is gone now, or the default arguments of torch.distributed.nn, which DDP
    # imports: hence the import above, before there is a group.
    dist.destroy_process_group()
    if not finished:
        sys.exit(128 + signal.SIGTERM)


# The launch


def under_torchrun():
    """Whether a launcher has started this process as one rank of a job."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()


def refuse(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"ddp_reference.py: {message}", file=sys.stderr)
    sys.exit(2)


def launch(args):
    """Start the job's processes and wait for them, or be one, where torchrun has started this one.

    Returns the exit status.
    """
    if args.parallel != "ddp":
        try:
            return 0 if train(args, local_device(0), rank=0, world_size=1) else 128 + signal.SIGTERM
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    if under_torchrun():
        worker(int(os.environ["LOCAL_RANK"]), args)
        return 0
    # The ranks meet at a port that the operating system chooses and that is held from then on: to look
    # for a free one and use it later is a race (pytorch/pytorch#126510).
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "0")
    try:
        listener = socket.create_server((address[0], int(address[1])))
    except (OSError, ValueError, OverflowError) as error:
        refuse(f"cannot listen on MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}: {error}")
    address = listener.getsockname()[:2]
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    # Else Ctrl-C and a failed rank end in a warning of semaphores that the loader workers' queues have left behind.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    # glibc reads these when a process starts. Otherwise it hands the memory of large tensors back to the
    # system after each step and faults it in again in the next: a quarter of the main job's speed on a CPU.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    # Until a worker is ready for it: Ctrl-C while it imports torch would show the import's traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    context = mp.spawn(worker, (args, address), args.nproc_per_node, join=False)
    if args.checkpoint:  # the ranks will write one and end
        signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in context.processes])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while not context.join(grace_period=2):
            pass
    except mp.ProcessExitedException as error:
        if error.signal_name not in (None, "SIGINT"):  # a rank that raised has told why itself
            print(f"rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


# Beside the core: samples streamed from tar shards, for data too large to index


def find_shards(pattern):
    """The paths that `name-{000..003}.tar` or a glob pattern stands for. Raises ValueError if there are none."""
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if braces:
        numbers = range(int(braces[1]), int(braces[2]) + 1)
        paths = [pattern[:braces.start()] + str(number).zfill(len(braces[1])) + pattern[braces.end():]
                 for number in numbers]
    else:
        paths = sorted(glob.glob(pattern))
    for path in paths or [pattern]:
        if not os.path.isfile(path):
            raise ValueError(f"there is no shard {path}")
    return paths


def shard_members(path):
    """(key, extension, open file, tarfile.TarInfo) of each member of a tar that belongs to a sample.

    The format is webdataset's: `folder/000017.x.npy` has the key `folder/000017` and the extension
    `x.npy`; members of one sample lie together. Directories and special members are skipped.
    Raises ValueError for what is not a tar, or not all of one.
    """
    empty = True
    with open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while member := tar.next():
                    tar.members.clear()  # or it would keep them all
                    name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                    if member.isreg() and not member.issparse() and name:
                        empty = False
                        yield name[1], name[2].lower(), file, member
                # tarfile takes a damaged header for the end; the real one is a block of zeros.
                file.seek(tar.offset)
                if file.read(512) != bytes(512):
                    raise tarfile.ReadError("damaged or cut off")
                if empty:
                    raise tarfile.ReadError("no sample is in it")
        except tarfile.TarError as error:
            raise ValueError(f"{path} is no shard, or not all of one: {error}") from error


def read_shard(path):
    """Yield the samples of a tar file in order: a dict of "__key__" and an entry an extension.

    .npy becomes an array, .cls an int, .json what it says, .txt a str; the rest stays bytes. Nothing is
    unpacked to disk or unpickled. Raises ValueError, naming file and member, for what cannot be read.
    """
    # read_array is what np.load comes to for a .npy, without looking first what else it may be.
    decoders = {"npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
                "cls": int, "json": json.loads, "txt": bytes.decode}
    for key, members in itertools.groupby(shard_members(path), key=operator.itemgetter(0)):
        sample = {"__key__": key}
        for _, extension, file, member in members:
            # Straight from the member's place in the file: tarfile's own reader costs as much again.
            file.seek(member.offset_data)
            data = file.read(member.size)
            try:
                decode = decoders.get(extension.rpartition(".")[2])
                sample[extension] = decode(data) if decode else data
            except Exception as error:  # a damaged .npy header alone can raise half a dozen kinds
                raise ValueError(f"{path}, member {member.name}: {error}") from error
        yield sample


def training_pair(path, sample):
    """A sample's (x, y) as tensors: float32 (3, L), int64 (L,). Raises ValueError if it has no such."""
    x, y = (sample.get(name) for name in ("x.npy", "y.npy"))
    for name, array in (("x.npy", x), ("y.npy", y)):
        if array is None:
            raise ValueError(f"{path}, sample {sample['__key__']}: no {name}, only {sorted(sample)[1:]}")
    if (x.dtype, x.shape[:1], x.ndim, y.dtype, y.shape) != (np.float32, (3,), 2, np.int64, x.shape[1:]):
        raise ValueError(f"{path}, sample {sample['__key__']}: x is {x.dtype} {x.shape}, y is {y.dtype} {y.shape}, "
                         "but x must be float32 (3, L) and y int64 (L,)")
    return torch.from_numpy(x), torch.from_numpy(y)


def count_samples(shards):
    """How many samples tar files hold; reads their headers only."""
    return sum(1 for path in shards
               for _ in itertools.groupby(shard_members(path), key=operator.itemgetter(0)))


def shuffled(items, size, generator):
    """The items, mixed as far as a buffer of `size` of them reaches."""
    buffer = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
        else:
            i = generator.integers(size)
            yield buffer[i]
            buffer[i] = item
    generator.shuffle(buffer)
    yield from buffer


class ShardStream(IterableDataset):
    """The training pairs in tar shards, read in order. Call set_epoch before each epoch.

    resampled=True, for training: every loader worker of every rank draws shards with replacement from
        a random stream of its own, without end, and samples_per_epoch, counted over all ranks, cuts
        that into epochs. So every rank has equally many samples, whatever the shards hold, and none
        waits for one that has run out (webdataset#225).
    resampled=False, for evaluation, where no step is a collective: the shards are dealt out to the
        ranks, and a rank's to its workers. Each sample is read exactly once; who gets no shard reads
        nothing. samples_per_epoch is not used.
    shuffle_buffer: samples to mix; a shard is always read in the order in which it was written. Resampled,
        it is filled anew for each epoch, by every worker: let a worker's part of an epoch be much larger,
        or else shards hold no more samples than it does, as those further back are never reached.

    What is read depends on (seed, epoch, start, rank, worker) alone. num_replicas and rank default to
    those of the process group. Reads as read_shard does, and raises what it raises.
    """

    def __init__(self, shards, samples_per_epoch, *, resampled=True, shuffle_buffer=1000, seed=0,
                 num_replicas=None, rank=None):
        self.shards, self.samples_per_epoch, self.resampled = list(shards), samples_per_epoch, resampled
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        # In shared memory: persistent loader workers hold a copy of this object from their start on.
        self.place = torch.zeros(2, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch, start=0):
        """start: samples of the epoch that all ranks together have read: only the rest is drawn."""
        self.place[0], self.place[1] = epoch, start

    def __len__(self):
        """This rank's samples in the (rest of the) epoch."""
        if not self.resampled:
            raise TypeError("a rank does not know how many samples its shards hold")
        return math.ceil((self.samples_per_epoch - int(self.place[1])) / self.num_replicas)

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, start = self.place.tolist()
        generator = np.random.default_rng((self.seed, epoch, start, self.rank, worker))
        if self.resampled:
            shards = (self.shards[generator.integers(len(self.shards))] for _ in itertools.count())
            count = len(range(worker, len(self), num_workers))
            buffer = max(1, min(self.shuffle_buffer, count))
        else:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.shards))
            shards = (self.shards[i] for i in order[self.rank::self.num_replicas][worker::num_workers])
            count, buffer = None, self.shuffle_buffer
        pairs = (training_pair(path, sample) for path in shards for sample in read_shard(path))
        return itertools.islice(shuffled(pairs, buffer, generator), count)


class Remix:
    """The batches of a ShardStream's loader, taken apart, mixed and put together anew.

    A loader worker fills a batch by itself, so its samples would come from that worker's shards alone;
    and every worker would end with a short batch. Here only the last one is short, or dropped.
    """

    def __init__(self, loader, batch_size, buffer, drop_last=False, pin_memory=False):
        self.loader, self.dataset, self.batch_size, self.buffer = loader, loader.dataset, batch_size, buffer
        self.drop_last, self.pin_memory = drop_last, pin_memory

    def __len__(self):
        batches = len(self.loader.dataset) / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)

    def __iter__(self):
        stream = self.loader.dataset
        generator = np.random.default_rng((stream.seed, *stream.place.tolist(), stream.rank))
        # Copies: a view would keep its whole batch in the shared memory through which the worker sent it.
        pairs = ((x.clone(), y.clone()) for batch in self.loader for x, y in zip(*batch))
        pairs = shuffled(pairs, self.buffer, generator)
        for _ in range(len(self)):
            x, y = default_collate(list(itertools.islice(pairs, self.batch_size)))
            yield (x.pin_memory(), y.pin_memory()) if self.pin_memory else (x, y)


def write_shards(folder, num_samples=100, length=10000, seed=0, shard_size=25):
    """Write a SyntheticDataset as tar shards of shard_size samples, into a new folder or an empty one.

    Raises FileExistsError if there is something in it.
    """
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise FileExistsError(f"{folder} is not empty")
    dataset = SyntheticDataset(num_samples, length, seed)
    for first in range(0, num_samples, shard_size):
        with tarfile.open(os.path.join(folder, f"{first // shard_size:06d}.tar"), "x") as tar:
            for i in range(first, min(first + shard_size, num_samples)):
                for name, tensor in zip("xy", dataset[i]):
                    data = io.BytesIO()
                    np.save(data, tensor.numpy())
                    member = tarfile.TarInfo(f"{i:06d}.{name}.npy")
                    member.size = data.tell()
                    data.seek(0)
                    tar.addfile(member, data)


# Beside the core: the sampler shown at work


CASES = [  # what it shows, samples, with a sampler, set_epoch called, the loader's drop_last
    ("1: no sampler: every rank reads everything", 8, False, False, True),
    ("2: with the sampler: the ranks split the data, the same way every epoch", 8, True, False, True),
    ("3: set_epoch: a new split each epoch", 8, True, True, True),
    ("4: 3 samples for each rank: short batches are kept", 6, True, False, False),
    ("4, dropping the short batch: a batch of 4 never fills, nothing is read", 6, True, False, True),
    ("5: 5 samples on 2 ranks: one is repeated to make 6", 5, True, False, False),
    ("5, with set_epoch: the repeated sample is the first of that epoch's order", 5, True, True, False),
    ("6: each rank's last batch is a single sample, which BatchNorm may refuse", 10, True, False, False),
    ("7: drop_last on the loader: that batch is gone", 10, True, False, True),
]


def show_case(title, num_samples, with_sampler, set_epoch, loader_drop_last, num_replicas=2, batch_size=4,
              drop_last=False, pad=True):
    """Print what each rank reads in two epochs: its stripe of the epoch's order, then its batches."""
    colour = "\033[{}m{}\033[0m".format if sys.stdout.isatty() else lambda code, text: text
    print(f"case {colour(1, title)}\n{num_samples} samples, {num_replicas} ranks, batches of {batch_size}")
    width = len(str(num_samples - 1)) + 2
    for epoch in range(2):
        ranks = []
        for rank in range(num_replicas):
            sampler = range(num_samples)
            if with_sampler:
                sampler = DistributedSampler(sampler, num_replicas, rank, drop_last=drop_last, pad=pad)
                sampler.set_epoch(epoch if set_epoch else 0)
            ranks.append(list(BatchSampler(sampler, batch_size, loader_drop_last)))
        stripes, seen = [""] * num_replicas, set()
        for turn in itertools.zip_longest(*(itertools.chain(*batches) for batches in ranks)):
            for reader, sample in enumerate(turn):
                repeated = sample in seen
                cell = "" if sample is None else f"{sample}{'*' if repeated else ' '}"
                for rank in range(num_replicas):
                    stripes[rank] += colour(31 if repeated else 32, (cell if rank == reader else "").rjust(width))
                seen.add(sample)
        for rank, (stripe, batches) in enumerate(zip(stripes, ranks)):
            shown = [str(batch) if len(batch) == batch_size else colour(33, f"{batch} short") for batch in batches]
            print(f"  epoch {epoch}  rank {rank} {stripe}    {' '.join(shown) or 'nothing'}")
        unread = [str(sample) for sample in range(num_samples) if sample not in seen]
        if unread:
            print(f"  epoch {epoch}  read by no rank: {' '.join(unread)}")
    print()


def cases(argv):
    """The command `cases`: nine experiments, or one with the reader's own numbers."""
    parser = Parser(prog="ddp_reference.py cases", description="Print which samples each rank reads, in nine "
                    "experiments or, with --num-samples, in your own. * marks a sample that was already read.")
    parser.add_argument("--num-samples", type=whole(1, 10000), metavar="N")
    parser.add_argument("--num-replicas", type=whole(1, 1000), default=2, metavar="W", help="ranks [%(default)s]")
    parser.add_argument("--batch-size", type=whole(1), default=4, metavar="B", help="[%(default)s]")
    parser.add_argument("--drop-last", action="store_true", help="the sampler drops what it would pad")
    parser.add_argument("--loader-drop-last", action="store_true", help="the loader drops a short batch")
    parser.add_argument("--no-set-epoch", action="store_true", help="set_epoch is forgotten")
    parser.add_argument("--no-pad", action="store_true", help="the sampler does not pad")
    args = parser.parse_args(argv)
    if args.num_samples:
        show_case("of your own", args.num_samples, True, not args.no_set_epoch, args.loader_drop_last,
                  args.num_replicas, args.batch_size, args.drop_last, not args.no_pad)
    elif argv:
        refuse(f"cases: {argv[0]} needs --num-samples too")
    else:
        for case in CASES:
            show_case(*case)


# The command line


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses bad input in one line, without the usage before it."""

    def error(self, message):
        refuse(f"{message} (see --help)")


def whole(low, high=2**63 - 1):
    """An argparse type: a whole number in [low, high]."""
    def parse(text):
        if not (text.isdecimal() and low <= int(text) <= high):
            limit = f"of at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limit}")
        return int(text)
    return parse


def positive(text):
    """An argparse type: a finite number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def nonempty(text):
    """An argparse type: a path or pattern. An unset variable in a script makes an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def add_data_options(group):
    """The options of the synthetic data set: of the main job and of write-shards."""
    group.add_argument("--num-samples", type=whole(1, 2**40), default=100, metavar="N",
                       help="samples in the data set [%(default)s]")
    group.add_argument("--length", type=whole(2, 2**28), default=10000, metavar="L",
                       help="positions in a sample [%(default)s]")
    group.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="S",
                       help="of all that is random [%(default)s]")


def make_parser():
    """The options of the main job; parse_args checks how they go together."""
    parser = Parser(prog="ddp_reference.py", formatter_class=argparse.RawDescriptionHelpFormatter, description="""\
Data-parallel training of a small net, on all GPUs of this machine or on its CPU.
Other commands: cases (what each rank reads), write-shards DIR; each has a --help.""", epilog="""\
examples:
  bash run.sh                                        the main job; about ten seconds on two cores
  bash run.sh --nproc-per-node 4 --accumulate 4      four processes, steps of 4 x 4 x 4 samples
  bash run.sh --checkpoint ck.pt --checkpoint-every 100     killed? the same line again goes on""")
    job = parser.add_argument_group("processes")
    job.add_argument("--nproc-per-node", type=whole(1, 4096), metavar="N",
                     help="processes on this machine [one per GPU; without a GPU 2]")
    job.add_argument("--backend", choices=["nccl", "gloo"],
                     help="gloo lets processes share a GPU [nccl if each has its own, else gloo]")
    job.add_argument("--parallel", choices=["ddp", "dp", "none"], default="ddp",
                     help="DistributedDataParallel; or, in one process, nn.DataParallel over all GPUs, or the "
                          "bare net [%(default)s]")
    job.add_argument("--num-workers", type=whole(0), default=0, metavar="N",
                     help="loader processes of each process; 0: it loads its data itself [%(default)s]")
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=whole(1), default=6, metavar="N", help="[%(default)s]")
    training.add_argument("--batch-size", type=whole(1), default=4, metavar="N",
                          help="samples in a batch of one process, or GPU [%(default)s]")
    training.add_argument("--accumulate", type=whole(1), default=1, metavar="K",
                          help="batches in a step of one process [%(default)s]")
    training.add_argument("--lr", type=positive, default=0.01, metavar="X",
                          help="learning rate of Adam; it is not scaled by the number of processes, and the "
                               "samples in a step are [%(default)s]")
    training.add_argument("--drop-last", action="store_true",
                          help="leave out samples that do not fill a batch on every process")
    training.add_argument("--amp", action="store_true", help="run the net under bfloat16 autocast")
    training.add_argument("--sync-bn", action="store_true",
                          help="BatchNorm over the batches of all processes (GPUs only)")
    training.add_argument("--log-interval", type=whole(1), default=10, metavar="N",
                          help="steps between two looks at loss and SIGTERM; each waits for the GPU [%(default)s]")
    data = parser.add_argument_group("data")
    add_data_options(data)
    data.add_argument("--shards", type=nonempty, metavar="PATTERN",
                      help="train on tar shards instead, where --num-samples and --length mean nothing: a glob pattern, "
                           "or name-{000..003}.tar")
    data.add_argument("--val-shards", type=nonempty, metavar="PATTERN", help="and evaluate on these")
    data.add_argument("--samples-per-epoch", type=whole(1), metavar="N",
                      help="of the shards, over all processes [as many as they hold, which is counted first]")
    resuming = parser.add_argument_group("resuming")
    resuming.add_argument("--checkpoint", type=nonempty, metavar="PATH",
                          help="resume from this file if it exists; write it after each epoch and on SIGTERM")
    resuming.add_argument("--checkpoint-every", type=whole(1), metavar="N", help="and after every N steps")
    return parser


def parse_args(argv=None):
    """The command line; what it leaves open is decided, what cannot work is refused, before any process starts."""
    args, gpus = make_parser().parse_args(argv), torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warning says the same in several lines
        if gpus and not torch.cuda.is_available():
            refuse(f"this machine has {gpus} GPU(s), but CUDA cannot start: mend the driver (does nvidia-smi run?), "
                   "or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)")
    if args.parallel != "ddp":
        if under_torchrun() or (args.nproc_per_node or 1) > 1:
            refuse(f"--parallel {args.parallel} is a single process")
        args.nproc_per_node = world_size = 1
        if args.parallel == "dp":
            args.batch_size *= max(1, gpus)  # one loader feeds all GPUs
    elif under_torchrun():
        numbers = [os.environ.get(name, "1") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        if not (all(map(str.isdecimal, numbers)) and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
            refuse("RANK is set, as by torchrun, but of RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR "
                   "and MASTER_PORT one is missing or no number: unset them, or start with torchrun")
        if args.nproc_per_node:
            refuse("--nproc-per-node is torchrun's own here: give it to torchrun, before the file's name")
        args.nproc_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        world_size = int(os.environ["WORLD_SIZE"])
    else:
        args.nproc_per_node = world_size = args.nproc_per_node or gpus or 2
    # Some launchers show each process one GPU, its own. (Several torchrun processes that share one: --backend gloo.)
    gpu_each = args.nproc_per_node <= gpus or gpus == 1 and under_torchrun()
    args.backend = args.backend or ("nccl" if gpu_each else "gloo")
    if args.backend == "nccl" and not gpu_each:
        refuse(f"NCCL needs a GPU for each process, and {args.nproc_per_node} processes have {gpus}: "
               f"use --backend gloo" + (", which lets them share" if gpus else ""))
    if args.amp and args.parallel == "dp":
        refuse("--amp needs --parallel ddp: DataParallel's threads would run the net in float16, not bfloat16")
    if args.sync_bn and (not gpus or args.parallel != "ddp"):
        refuse("--sync-bn needs GPUs and --parallel ddp: PyTorch's SyncBatchNorm runs on nothing else")

    args.job = {"number of samples": args.num_samples, "length": args.length, "seed": args.seed}
    if args.shards and args.val_shards:
        try:
            args.shards, args.val_shards = find_shards(args.shards), find_shards(args.val_shards)
            for path in args.shards[0], args.val_shards[0]:
                training_pair(path, next(read_shard(path)))
            args.num_samples = args.samples_per_epoch or count_samples(args.shards)
        except (OSError, ValueError) as error:
            refuse(error)
        args.job = {"number of shards": len(args.shards), "samples per epoch": args.num_samples, "seed": args.seed}
    elif args.shards or args.val_shards or args.samples_per_epoch:
        refuse("--shards and --val-shards go together, and --samples-per-epoch with them")
    if args.drop_last and args.num_samples // world_size < args.batch_size:
        refuse(f"--drop-last leaves nothing to train on: {args.num_samples} samples on {world_size} "
               f"processes do not fill one batch of {args.batch_size}")

    if args.checkpoint:
        folder = os.path.dirname(os.path.realpath(args.checkpoint))
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            refuse(f"--checkpoint {args.checkpoint}: cannot create a file in {folder}: {error.strerror}")
        try:
            load_checkpoint(args.checkpoint, args.job, ConvNet())
        except ValueError as error:
            refuse(error)
    elif args.checkpoint_every:
        refuse("--checkpoint-every needs --checkpoint PATH")
    return args


def main(argv):
    """The program: train, or one of the other commands. Returns the exit status."""
    if argv[:1] == ["cases"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `cases | head` is no error
        return cases(argv[1:])
    if argv[:1] == ["write-shards"]:
        parser = Parser(prog="ddp_reference.py write-shards", description="Write the synthetic data set as tar shards.")
        parser.add_argument("folder", metavar="DIR", help="new or empty")
        parser.add_argument("--shard-size", type=whole(1), default=25, metavar="M", help="samples in a shard [%(default)s]")
        add_data_options(parser)
        args = parser.parse_args(argv[1:])
        try:
            write_shards(**vars(args))
        except OSError as error:
            refuse(error)
        print(f"{args.num_samples} samples in {math.ceil(args.num_samples / args.shard_size)} shards in {args.folder}")
        return 0
    return launch(parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
