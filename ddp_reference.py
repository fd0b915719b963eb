"""Data-parallel training with PyTorch in one file: run it, read it, copy it and edit your copy.

    bash run.sh         # one process per GPU, or two on the CPU (options: --help)
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

Several processes run this file. Each has a number from 0, its rank; their count is the world size.
Every rank holds a copy of the net. A step's global batch is cut into shares, dealt to the ranks.
Each rank computes the gradients of its shares, one after the other, and DistributedDataParallel
(DDP) combines those of all ranks. Then all take the same optimizer step, so their copies stay
equal. (That is chapters 1 to 5. Read a helper, in 6 to 8, when you meet its call.)

Some calls, the collectives, need every rank. An all-reduce gives every rank the sum of all ranks'
tensors, an all-gather gives every rank all the tensors, and a broadcast gives every rank the tensor
of one rank. If a rank skips a collective, the others wait for it, or their call pairs with its next
collective, and data get mixed up. RANKS MEET marks collectives (NCCL's on GPUs, gloo's on CPUs).
RANKS DIFFER marks where ranks begin to differ.

The number of ranks changes the speed of a training, and its result only by rounding (more with
--amp, or with a bias before BatchNorm under Adam), because a share has the samples, random numbers
and BatchNorm statistics that it would have on a rank of its own. Exceptions are nets that call
collectives, as nn.SyncBatchNorm does, or change state that state_dict() lacks. A killed job goes on
if started again with the same --checkpoint, on any number of ranks that divides the shares.
"""

import ctypes
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

# Unused, but if PyTorch imports it later, gloo may crash at exit (pytorch/pytorch#190489).
import torch.distributed.nn
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset


# ---- 1. Your task: the data, the net, the loss, the learning rate, the options. Edit this chapter.
class SyntheticDataset(TensorDataset):
    """Random signals x, float32 (3, length), with labels y, int64 (length,): y[t] is the channel
    whose mean over t - 1, t and t + 1 is largest.
    """

    def __init__(self, num_samples, length, seed):
        x = torch.randn(num_samples, 3, length, generator=torch.Generator().manual_seed(seed))
        super().__init__(x, F.avg_pool1d(x, 3, stride=1, padding=1).max(1).indices)


class ConvNet(nn.Sequential):
    """Three Conv1d layers with BatchNorm1d: float32 (N, 3, L) to logits (N, 3, L)."""

    def __init__(self):
        layers = []
        for in_channels, out_channels in ((3, 16), (16, 32), (32, 3)):
            # BatchNorm would remove any bias of the convolution.
            conv = nn.Conv1d(in_channels, out_channels, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm1d(out_channels), nn.ReLU()]
        super().__init__(*layers[:-1])  # After the logits there is no ReLU.


SUMS = ("labels", "loss", "accuracy")  # The first divides the others, and the second is minimized.


def count_labels(y):
    """Return the number of labels, a tensor (). y: int64 (N, ...), where -100 means no label."""
    return (y != -100).sum()


def batch_sums(output, y):
    """Return the SUMS of a batch: float64 (len(SUMS),).

    output: logits (N, C, ...). y: int64 (N, ...). Sums of batches can be added up. Means cannot,
    because the numbers of labels differ.
    """
    output = output.to(torch.promote_types(output.dtype, torch.float32))  # bfloat16 is too coarse.
    loss = F.cross_entropy(output, y, reduction="sum")
    predicted = output.max(1).indices  # argmax() is slower on a CPU.
    return torch.stack([count_labels(y), loss.double(), (predicted == y).sum()])


def lr_factor(args, epochs_done):
    """Return what multiplies the optimizer's learning rates when, say, 2.5 epochs are done."""
    return 1  # With a warm-up: min(1, epochs_done + 0.1)


def make_task(args, device):
    """Return (train_set, val_set, net, optimizer), with the net on the device.

    An item is a tuple of tensors, of which the last is y. Reading one may draw random numbers from
    the global generators, which are seeded before each item (chapter 7), or from one that is seeded
    by its index. The global ones are seeded before this call, too, so all ranks make the same net.
    Each epoch sets train mode, in frozen layers, too.
    """
    train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
    val_set = SyntheticDataset(125, args.length, args.seed + 1)
    net = ConvNet().to(device)
    return train_set, val_set, net, torch.optim.Adam(net.parameters(), lr=args.lr)


def positive_int(text):
    """Return int(text). Raises ValueError, which argparse reports, if it is below 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args():
    """Return (args, refuse). refuse(message) prints one line and exits with status 2."""
    parser = ArgumentParser(usage=SUPPRESS, formatter_class=ArgumentDefaultsHelpFormatter)
    add = partial(parser.add_argument, type=positive_int)
    nproc = torch.cuda.device_count() or 2
    add("--nproc-per-node", default=nproc, help="processes to start")
    add("--num-workers", type=int, default=0, help="readers of a rank, at least one a share")
    add("--epochs", default=6, help="passes over the training data")
    add("--global-batch-size", default=240, help="samples in a step, over all ranks")
    add("--shares", default=nproc if 8 % nproc else 8, help="parts of a step, dealt out to ranks")
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--clip-grad-norm", type=float, default=0, help="norm to clip to; 0: do not clip")
    add("--seed", type=int, default=0, help="of all random numbers")
    # realpath: saving replaces the file that a link names, not the link.
    add("--checkpoint", type=os.path.realpath, help="a file: resume from it, or make it")
    add("--checkpoint-every", help="also write it every so many steps of an epoch")
    add("--log-every", default=50, help="steps of an epoch between lines")
    add("--timeout", default=600, help="end the job after so many seconds without a batch")
    add("--num-samples", default=1200, help="of the synthetic data")
    add("--length", default=1000, help="of a synthetic signal")
    parser.add_argument("--amp", action="store_true", help="run under bfloat16 autocast")
    return parser.parse_args(), parser.error


# ---- 2. Which samples a rank reads
class DistributedSampler(Sampler):
    """Like PyTorch's DistributedSampler, but it can go on in the middle of an epoch.

    Let W be num_replicas (by default the world size) and B the global batch size. All ranks draw
    one order from seed + epoch, and rank r (by default the process group's) reads its positions r,
    r + W, r + 2W, ... If each loader makes batches of B / W, then the k-th batches of all ranks are
    together the positions k*B to k*B + B - 1, whatever W is. If W does not divide the dataset, the
    first samples are repeated, or with drop_last the last ones left out. Raises ValueError for a
    rank that does not exist.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.dataset = dataset
        self.num_replicas = num_replicas or dist.get_world_size()
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"there is no rank {self.rank} of {self.num_replicas}")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        round_up = 0 if drop_last else self.num_replicas - 1
        self.num_samples = (len(dataset) + round_up) // self.num_replicas
        self.total_size = self.num_samples * self.num_replicas
        self.set_epoch(0)

    def set_epoch(self, epoch, samples_read=0):
        """Choose the epoch's order, and skip its first samples_read samples, a multiple of W."""
        if samples_read % self.num_replicas:
            raise ValueError(f"{self.num_replicas} ranks cannot have read {samples_read} samples")
        self.epoch = epoch
        self.samples_read = samples_read
        self.was_read = False

    def __len__(self):
        return self.num_samples - self.samples_read // self.num_replicas

    def __iter__(self):
        order = range(len(self.dataset))
        if self.shuffle:
            if self.was_read:  # PyTorch's sampler says nothing (pytorch/pytorch#31771).
                warnings.warn("this order was read before: call set_epoch(epoch)")
            self.was_read = True
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            # int32 takes 4 bytes a sample, and a memoryview is quick to index.
            order = torch.randperm(len(order), generator=generator, dtype=torch.int32)
            order = memoryview(order.numpy())
        for position in range(self.samples_read + self.rank, self.total_size, self.num_replicas):
            yield order[position % len(order)]  # RANKS DIFFER in the position.


# ---- 3. A step, and evaluation
def forward(model, batch, amp):
    """Return batch_sums() of a batch: a sequence of tensors, of which the last is y."""
    device = next(model.parameters()).device
    *inputs, y = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, torch.bfloat16, amp):
        return batch_sums(model(*inputs), y)


@torch.no_grad()
def sync_buffers(net, joined=None):
    """Give the net the buffers of rank 0, such as the statistics of BatchNorm.

    Returns them joined, as bytes. Given these, it sets them again. Those that state_dict() lacks
    stay as they are, because their sizes may differ by rank.
    """
    saved = net.state_dict()
    buffers = [buffer for name, buffer in net.named_buffers() if name in saved]
    if not buffers:
        return None
    # A view() needs aligned bytes, so longer dtypes come first.
    buffers.sort(key=torch.Tensor.element_size, reverse=True)
    if joined is None:  # One tensor is sent faster than many.
        joined = torch.cat([buffer.ravel().view(torch.uint8) for buffer in buffers])
        dist.broadcast(joined, src=0)  # RANKS MEET
    for buffer, part in zip(buffers, joined.split([buffer.nbytes for buffer in buffers])):
        buffer.copy_(part.view(buffer.dtype).view_as(buffer))
    return joined


def train_step(model, optimizer, shares, seed=None, clip_grad_norm=0, amp=False):
    """Take one optimizer step from this rank's shares of the global batch.

    shares: batches, as many on every rank. seed: if given, seed_generators(*seed, s) is called
    before share s. The gradient is that of the mean loss over all labels of the global batch.
    Returns batch_sums() of the global batch. With pinned batches, nothing waits for the GPU. Raises
    TypeError unless model is a DDP model, and each batch a tuple or list of tensors.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError("train_step() needs DistributedDataParallel(net)")
    if not all(isinstance(s, (tuple, list)) and all(map(torch.is_tensor, s)) for s in shares):
        raise TypeError("shares must be batches: each a tuple or list of tensors, with y last")

    # Count the labels of the global batch. Their sum arrives during the first forward pass.
    device = next(model.parameters()).device
    num_labels = sum(count_labels(share[-1]) for share in shares).double()
    num_labels = num_labels.to(device, non_blocking=True)
    counting = dist.all_reduce(num_labels, async_op=True)  # RANKS MEET

    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, buffers = 0, None
    for index in reversed(range(len(shares))):
        # Each share begins with the buffers that rank 0 had before the step. Share 0 is last, and
        # rank 0 keeps what it leaves. With one share a rank, DDP alone does the same.
        buffers = sync_buffers(model.module, buffers)  # RANKS MEET at the first turn.
        if seed:
            seed_generators(*seed, rank + index * world_size)  # RANKS DIFFER in dropout.
        # Gradients add up, and DDP all-reduces them in the last backward pass.
        with model.no_sync() if index else nullcontext():
            sums = forward(model, shares[index], amp)
            counting.wait()
            # DDP averages the gradients over the ranks. Times the world size, this is their sum,
            # and divided by the number of labels, the gradient of the mean over all labels
            # (huggingface/transformers#34242). Without labels the gradient is 0.
            scale = world_size / num_labels.clamp(min=1e-9)
            (sums[1] * scale).backward()  # RANKS MEET at the last turn.
        total += sums.detach()
    dist.all_reduce(total)  # RANKS MEET

    if clip_grad_norm > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    model.zero_grad()  # Parameters that the optimizer lacks have gradients, too.
    return total


@torch.no_grad()
def evaluate(net, batches, amp=False):
    """Return the batch_sums() over all ranks' batches. net: not the DDP model. Sets eval mode."""
    sync_buffers(net)  # RANKS MEET
    net.eval()
    total = next(net.parameters()).new_zeros(len(SUMS), dtype=torch.float64)
    for batch in batches:  # Their number may differ by rank, so here is no collective.
        total += forward(net, batch, amp)
    dist.all_reduce(total)  # RANKS MEET
    return total


def named_means(sums, prefix=""):
    """Return the means of SUMS over the labels as a text: "loss 0.50000 accuracy 0.75000"."""
    means = sums[1:] / sums[0]
    return " ".join(f"{prefix}{name} {mean:#.5g}" for name, mean in zip(SUMS[1:], means))


@torch.no_grad()
def check_copies(net):
    """Raise RuntimeError, on a rank whose parameters differ from those of rank 0.

    DDP averages only the gradients of parameters that required them when it was made. Rounding is
    no error: kinds of GPUs differ in it.
    """
    for name, parameter in net.named_parameters():
        expected = parameter.contiguous().clone()
        dist.broadcast(expected, src=0)  # RANKS MEET
        if not torch.allclose(parameter, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise RuntimeError(f"the ranks' {name} differ: unused, unfrozen late, model.module()?")


# ---- 4. The loop
def make_loaders(args, train_set, val_set):
    """Return this rank's (train_loaders, val_loader). Each of its shares has a train loader."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if len(train_set) < args.global_batch_size:
        raise ValueError("--global-batch-size is larger than the training set")
    share_size = args.global_batch_size // args.shares
    options = {
        "num_workers": -(-args.num_workers * world_size // args.shares),  # rounded up
        "persistent_workers": args.num_workers > 0,  # Starting workers takes seconds.
        "worker_init_fn": end_with_parent,
        "pin_memory": torch.cuda.is_available(),
    }
    # Share s of S reads what rank s of S would read.
    train_loaders = []
    for share in range(rank, args.shares, world_size):  # RANKS DIFFER
        sampler = DistributedSampler(train_set, args.shares, share, seed=args.seed, drop_last=True)
        loader = DataLoader(train_set, share_size, sampler=sampler, drop_last=True, **options)
        train_loaders.append(loader)
    # A DistributedSampler would repeat samples here, which falsifies the means
    # (pytorch/pytorch#25162). Instead each rank takes every world_size-th batch.
    starts = range(rank * share_size, len(val_set), world_size * share_size)  # RANKS DIFFER
    val_batches = [range(len(val_set))[start : start + share_size] for start in starts]
    options["num_workers"] = args.num_workers
    return train_loaders, DataLoader(val_set, batch_sampler=val_batches, **options)


def train(args, device):
    """Train and evaluate. Every rank runs this."""
    rank, path = dist.get_rank(), args.checkpoint

    # Make the same task on every rank.
    seed_generators(args.seed)
    train_set, val_set, net, optimizer = make_task(args, device)
    train_set, val_set = SeededItems(train_set, args.seed), SeededItems(val_set, args.seed + 1)
    train_loaders, val_loader = make_loaders(args, train_set, val_set)
    base_lrs = [group["lr"] for group in optimizer.param_groups]  # before resume() changes them

    # Go on where the checkpoint ends. Its sums let the printed means cover the whole epoch.
    parts = {"net": net, "optimizer": optimizer}  # An average of the net would be one more part.
    identity = identify(args, train_set, net, optimizer)
    first_epoch, samples_read, sums = resume(path, identity, parts)  # RANKS MEET
    sums = sums.to(device)
    model = DistributedDataParallel(net)  # RANKS MEET: all get the parameters of rank 0.
    model.broadcast_buffers = False  # train_step() does. (DDP's argument is deprecated since 2.13.)
    if rank == 0:  # RANKS DIFFER
        if first_epoch or samples_read:
            print(f"resuming {path} at epoch {first_epoch}/{args.epochs}, sample {samples_read}")
        if path:  # A failure is better told now than after an epoch.
            save_checkpoint(path, identity, parts, (first_epoch, samples_read, sums))

    for epoch in range(first_epoch, args.epochs):
        for loader in train_loaders:
            loader.sampler.set_epoch(epoch, samples_read)  # Otherwise all epochs have one order.
        train_set.epoch.fill_(epoch)  # for random items (chapter 7)
        start_time = time.perf_counter()
        samples_at_start = samples_read
        model.train()
        for shares in watched(zip(*train_loaders), args.timeout):  # a batch of each share
            factor = lr_factor(args, epoch + samples_read / len(train_set))
            for group, lr in zip(optimizer.param_groups, base_lrs):
                group["lr"] = lr * float(factor)
            seed = args.seed, epoch, samples_read
            sums += train_step(  # RANKS MEET
                model, optimizer, shares, seed, args.clip_grad_norm, args.amp
            )
            samples_read += args.global_batch_size
            step = samples_read // args.global_batch_size
            if rank == 0:  # RANKS DIFFER
                if args.checkpoint_every and step % args.checkpoint_every == 0:
                    save_checkpoint(path, identity, parts, (epoch, samples_read, sums))
                if step % args.log_every == 0:
                    print(f"epoch {epoch} | {samples_read}/{len(train_set)} | {named_means(sums)}")

        means = named_means(sums)  # This waits for the GPU, so the clock is read after it.
        speed = (samples_read - samples_at_start) / (time.perf_counter() - start_time)
        check_copies(net)  # RANKS MEET here and in evaluate().
        val_means = named_means(evaluate(net, watched(val_loader, args.timeout), args.amp), "val_")
        samples_read = 0
        sums.zero_()
        if rank == 0:  # RANKS DIFFER
            if path:
                save_checkpoint(path, identity, parts, (epoch + 1, 0, sums))
            print(f"epoch {epoch} | {means} | {val_means} | {speed:.1f} samples/s")


# ---- 5. The processes
def run_rank(rank, world_size, args, init_method):
    """Run one rank: choose its device, join the process group that init_method names, train."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))  # on this machine
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # mp.spawn() takes KeyboardInterrupt for success.
    faulthandler.enable()  # A crash in C code prints its stack.
    sys.stdout.reconfigure(line_buffering=True)  # Otherwise lines reach files late.
    num_gpus = torch.cuda.device_count()
    device = torch.device("cpu")
    if num_gpus:
        device = torch.device(f"cuda:{local_rank % num_gpus}")  # RANKS DIFFER
        torch.cuda.set_device(device)
    if world_size == local_world_size:  # One machine, so the loopback interface is enough.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if local_world_size > num_gpus:  # NCCL lets ranks share a GPU if each seems to be a machine.
        os.environ["NCCL_HOSTID"] = f"{rank}"
    backend = "nccl" if num_gpus else "gloo"
    timeout = timedelta(seconds=args.timeout + 20)  # The watchdog (chapter 8) acts earlier.
    dist.init_process_group(backend, init_method, timeout, world_size, rank)  # RANKS MEET
    restart_watchdog(args.timeout)
    if rank == 0:  # RANKS DIFFER
        shares = f"global batch size {args.global_batch_size} in {args.shares} shares"
        print(f"ddp on {backend}, world size {world_size}, {shares}, torch {torch.__version__}")
        if 0 < num_gpus < local_world_size:
            warnings.warn("ranks share GPUs, which is slow: start fewer, or let each see all GPUs")
    train(args, device)
    # train() has freed the DDP model, which may hang if it outlives the group. After an exception
    # the group stays, as destroying it could wait for other ranks (pytorch/torchtitan#1342).
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def main():
    """Run one rank if torchrun has started this process, otherwise start --nproc-per-node ranks."""
    args, refuse = parse_args()
    under_torchrun = "LOCAL_RANK" in os.environ
    if ("RANK" in os.environ) != under_torchrun:
        refuse("RANK or LOCAL_RANK is set alone: unset it, or start torchrun on each machine")
    world_size = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.nproc_per_node
    batch_size = args.global_batch_size
    if args.shares % world_size or batch_size % args.shares:
        works = f"--shares {world_size} --global-batch-size {batch_size + -batch_size % world_size}"
        refuse(f"the processes must divide the shares, and these the global batch: try {works}")
    if args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint-every needs --checkpoint")

    if under_torchrun:
        # A loader worker forked from a rank, which has threads, may hang (see DDP's documentation).
        mp.set_start_method("spawn")
        return run_rank(int(os.environ["RANK"]), world_size, args, "env://")
    # Without this, each rank would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", f"{torch.get_num_threads() // world_size or 1}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The ranks find each other by a file. A port could be taken (pytorch/pytorch#126510).
            mp.spawn(run_rank, (world_size, args, f"file://{folder}/store"), world_size)
    except KeyboardInterrupt:
        os._exit(130)  # sys.exit() would wait for the ranks, which end when this process does.


# ---- 6. Checkpoints
def identify(args, train_set, net, optimizer):
    """Return texts that must be equal on all ranks, and in the run that wrote a checkpoint.

    A checksum of norms of the tensors and numbers in eight samples stands for the data. Raises
    ValueError if a sample differs when read again, or the net lacks a parameter of the optimizer.
    """
    indices = np.random.default_rng(0).integers(len(train_set), size=8).tolist()
    # In a worker, if there are any: a file opened here could not be sent to them.
    options = {"num_workers": min(args.num_workers, 1), "worker_init_fn": end_with_parent}
    norms = []
    for item in DataLoader(train_set, None, sampler=indices * 2, **options):
        parts = item if isinstance(item, list) else [item]  # The loader makes tuples lists.
        numbers = [torch.as_tensor(x) for x in parts if isinstance(x, (torch.Tensor, int, float))]
        norms.append([f"{x.double().norm():.6g}" for x in numbers])
    if norms[:8] != norms[8:]:
        raise ValueError("an item differs when read again: make_task() says what it may draw")
    names = {parameter: name for name, parameter in net.named_parameters()}
    parameters = [names.get(p) for group in optimizer.param_groups for p in group["params"]]
    if None in parameters:
        raise ValueError("the optimizer has a parameter that the net lacks: add it to the net")
    data = zlib.crc32(repr(norms).encode())
    options = [f"{args.seed=}", f"{args.global_batch_size=}", f"{args.shares=}"]
    task = [f"{len(train_set)=}", f"{data=}", f"{SUMS=}", f"optimizer {type(optimizer).__name__}"]
    return [*options, *task, f"{parameters=}"]


def save_checkpoint(path, identity, parts, progress):
    """Write a checkpoint, on rank 0 alone. A crash leaves the old file or the new one, never half.

    identity: texts that resume() compares. parts: a dictionary of objects with a state_dict().
    progress: (epoch, samples_read, sums). Raises FloatingPointError if the net holds a nan, and
    OSError if the file cannot be written or loaded again. Then the old file stays.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, value in states["net"].items():
        if torch.is_tensor(value) and value.isnan().any():
            raise FloatingPointError(f"{name} holds a nan, so nothing was written to {path}")
    try:
        # If two jobs have one checkpoint, each writes in a folder of its own.
        with tempfile.TemporaryDirectory(".tmp", dir=os.path.dirname(path)) as folder:
            temporary = f"{folder}/checkpoint"
            with open(temporary, "wb") as file:
                torch.save({"identity": identity, "progress": progress, **states}, file)
                file.flush()
                os.fsync(file)  # Otherwise a crash of the machine may leave an empty file.
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)  # as resume()
            os.replace(temporary, path)
    except Exception as error:
        raise OSError(f"nothing was written to {path}: {error}") from error


def resume(path, identity, parts):
    """Load the checkpoint, if there is one, and return (epoch, samples_read, sums).

    Without a file, all three are zero. sums is float64 (len(SUMS),) on the CPU. No code in the file
    is run, from PyTorch 2.6 on (CVE-2025-32434). Raises ValueError if the file is damaged or of
    another job, and RuntimeError if the ranks have unequal data or do not all find the file.
    """
    progress = 0, 0, torch.zeros(len(SUMS), dtype=torch.float64)
    if path and os.path.exists(path):
        try:
            if zipfile.ZipFile(path).testzip():  # torch.load() does not compare checksums.
                raise ValueError("a checksum is wrong")
            # Without map_location the copies of all ranks land on GPU 0 (pytorch/pytorch#23138).
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            if others := [text for text in checkpoint["identity"] if text not in identity]:
                raise ValueError(f"it is of a job with {', '.join(others)}")
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            progress = checkpoint["progress"]
        except Exception as error:
            raise ValueError(f"cannot resume from {path}: {error!r:.200}") from error
    texts = {*identity, *parts["net"].state_dict(), f"(epoch, sample) {progress[:2]}"}
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, texts)  # RANKS MEET before rank 0 writes.
    if unequal := set.union(*reports) - set.intersection(*reports):
        raise RuntimeError(f"ranks differ in data or net, or lack {path}: {sorted(unequal)!s:.300}")
    return progress


# ---- 7. Random numbers
def seed_generators(seed, *place):
    """Seed the generators of PyTorch, NumPy and Python for a place in the training.

    It is (epoch, index) for an item, and (epoch, samples_read, its number) for a share. So no
    checkpoint has to hold the state of a generator.
    """
    # Three seeds, because PyTorch and NumPy draw the same bits from the same seed.
    sequence = np.random.SeedSequence(seed, spawn_key=place)
    torch_seed, numpy_seed, python_seed = sequence.generate_state(3).tolist()
    # torch.manual_seed() takes 0.1 ms, which is too long for an item.
    torch.default_generator.manual_seed(torch_seed)
    if torch.cuda.is_initialized():  # in a rank on a GPU, not in loader workers
        torch.cuda.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


class SeededItems(Dataset):
    """A dataset whose items draw the same random numbers on any number of ranks and workers.

    The numbers follow from the seed, the epoch and the index. epoch.fill_(3) sets the epoch.
    """

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        self.epoch = torch.tensor(0).share_memory_()  # Loader workers see it change.

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        seed_generators(self.seed, self.epoch.item(), index)
        return self.dataset[index]


# ---- 8. Hangs, and processes that are left over
def end_with_parent(worker_id=None):
    """Have Linux kill this process, a rank or a loader worker, when its parent ends.

    mp.spawn() sends ranks only SIGINT, which background jobs (&) ignore, and loader workers
    notice the end after seconds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: the signal to receive.
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # It ended before this call.
        os._exit(1)


def restart_watchdog(timeout):
    """Start a clock anew. If it is not started again within timeout seconds, the job is ended.

    First the ranks print their stacks, one rank after another, even if stuck in C code.
    Rank 0, which may be saving alone, comes last, and exits. This ends the others.
    """
    rank = dist.get_rank()
    faulthandler.dump_traceback_later(timeout + 3 / (rank + 1), exit=rank == 0)  # RANKS DIFFER


def watched(batches, timeout):
    """Yield the batches, and restart the watchdog at each."""
    for batch in batches:
        restart_watchdog(timeout)
        yield batch


if __name__ == "__main__":
    main()
