"""Data-parallel training with PyTorch in one file: run it, read it, copy it and edit your copy.

    bash run.sh         # one process per GPU, or two on the CPU. --help lists the options.
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

Several processes run this file. Each has a number from 0, its rank; their count is the world size.
Every rank holds a copy of the net. In each step the ranks share one global batch of samples: each
rank computes the gradient of its own share, and DistributedDataParallel (DDP) averages these over
the ranks. Then all take the same optimizer step, so their copies stay equal. (That is chapters 1
to 5. Read a helper, in 6 to 9, when you meet its call.)

Some calls, the collectives, need every rank. An all-reduce gives every rank the sum of all ranks'
tensors, an all-gather gives every rank all the tensors, and a broadcast gives every rank the tensor
of one rank. If a rank skips a collective, the others wait for it, or their call pairs with its next
collective, and data get mixed up. RANKS MEET marks collectives (NCCL's on GPUs, gloo's on CPUs).
RANKS DIFFER marks where ranks begin to differ.

The number of ranks changes the speed of a training. Its result changes only by rounding (more so
with --amp). Exceptions are contrastive losses, random collate functions, dropout (each rank draws
its own masks), a bias before BatchNorm (Adam scales up a gradient of mere rounding), and BatchNorm
that sees a part of the batch (--local-bn, --micro-batch-size, track_running_stats=False). A killed
job goes on if started again with the same --checkpoint, on any number of ranks that divides the
global batch.
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


def batch_sums(output, y):
    """Return the SUMS of a batch: float64 (len(SUMS),).

    output: logits (N, C, ...). y: int64 (N, ...), where -100 means no label. Sums of batches can be
    added up. Means cannot, because the numbers of labels differ.
    """
    loss = F.cross_entropy(output.float(), y, reduction="sum")
    predicted = output.max(1).indices  # argmax() is slower on a CPU.
    return torch.stack([(y != -100).sum(), loss.double(), (predicted == y).sum()])


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
    val_set = SyntheticDataset(25, args.length, args.seed + 1)
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
    add("--nproc-per-node", default=torch.cuda.device_count() or 2, help="processes to start")
    add("--num-workers", type=int, default=0, help="reader processes of each loader")
    add("--epochs", default=6, help="passes over the training data")
    add("--global-batch-size", default=240, help="samples in a step, over all ranks")
    add("--micro-batch-size", help="samples that a rank computes at once; None: its whole share")
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
    parser.add_argument("--local-bn", action="store_true", help="BatchNorm over a rank's share")
    return parser.parse_args(), parser.error


# ---- 2. Which samples a rank reads
class DistributedSampler(Sampler):
    """Like PyTorch's DistributedSampler, but it can go on in the middle of an epoch.

    Let W be the world size, which PyTorch calls num_replicas, and B the global batch size. All
    ranks draw one order from seed + epoch, and rank r reads its positions r, r + W, r + 2W, ... If
    each loader makes batches of B / W, then the k-th batches of all ranks are together the
    positions k*B to k*B + B - 1: on any number of ranks a step has the same samples. If W does not
    divide the dataset, the first samples are repeated, or with drop_last the last ones left out.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.dataset = dataset
        self.num_replicas = num_replicas or dist.get_world_size()
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        round_up = 0 if drop_last else self.num_replicas - 1
        self.num_samples = (len(dataset) + round_up) // self.num_replicas
        self.total_size = self.num_samples * self.num_replicas
        self.set_epoch(0)

    def set_epoch(self, epoch, samples_read=0):
        """Choose the epoch's order, and skip its first samples_read samples (a multiple of W)."""
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


def train_step(model, optimizer, batch, micro_batch_size=None, clip_grad_norm=0, amp=False):
    """Take one optimizer step from this rank's share of the global batch.

    The gradient is that of the mean loss over all labels of the global batch. Ranks must have
    shares of equal size, and compute them in micro-batches. Returns batch_sums() of the global
    batch. With pinned batches, only nn.SyncBatchNorm waits for the GPU. Raises TypeError unless
    model is a DDP model, and batch a sequence of tensors with the sample as first dimension.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError("train_step() needs DistributedDataParallel(net)")
    if not all(map(torch.is_tensor, batch)) or len(set(map(len, batch))) > 1:
        raise TypeError("a batch must be tensors (the last is y) with the sample as dimension 0")
    micro_size = micro_batch_size or len(batch[-1])
    micro_batches = list(zip(*(tensor.split(micro_size) for tensor in batch)))
    total = 0
    for micro_batch in micro_batches:
        is_last = micro_batch is micro_batches[-1]
        # Gradients add up, and DDP all-reduces them in the last backward pass.
        with nullcontext() if is_last else model.no_sync():
            sums = forward(model, micro_batch, amp)  # RANKS MEET in BatchNorm.
            # RANKS MEET in BatchNorm and, if is_last, for gradients.
            sums[1].backward()  # the loss
        total += sums.detach()
    dist.all_reduce(total)  # RANKS MEET

    # DDP has averaged the gradients of each rank's sum of losses. Times the world size, this is the
    # gradient of the whole sum, and divided by the number of labels, that of the mean
    # (huggingface/transformers#34242). Without labels the gradient stays 0.
    factor = dist.get_world_size() / total[0].clamp(min=1e-9)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    if clip_grad_norm > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    model.zero_grad()  # Parameters that the optimizer lacks have gradients, too.
    return total


@torch.no_grad()
def evaluate(net, batches, amp=False):
    """Return the batch_sums() over all ranks' batches. net: not the DDP model. Sets eval mode."""
    for buffer in net.buffers():  # All ranks evaluate with the BatchNorm statistics of rank 0.
        buffer.data = buffer.contiguous()  # Strided ones would arrive wrong.
        dist.broadcast(buffer, src=0)  # RANKS MEET
    net.eval()
    total = next(net.parameters()).new_zeros(len(SUMS), dtype=torch.float64)
    for batch in batches:  # Their number may differ by rank, so here is no collective.
        total += forward(net, batch, amp)
    dist.all_reduce(total)  # RANKS MEET
    return total


def named_means(sums, prefix=""):
    """Return the means of SUMS over the labels as a text: "loss 0.5000 accuracy 0.7500"."""
    means = sums[1:] / sums[0]
    return " ".join(f"{prefix}{name} {mean:.4f}" for name, mean in zip(SUMS[1:], means))


def require_equal(texts, problem):
    """Raise RuntimeError, with the problem and what differs, unless all ranks pass equal sets."""
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, texts)  # RANKS MEET
    if unequal := set.union(*reports) - set.intersection(*reports):
        raise RuntimeError(f"{problem}: {sorted(unequal)!s:.300}")


def check_copies(net, with_buffers):
    """Raise RuntimeError, with their names, if tensors of the ranks' nets have unequal norms.

    DDP averages only the gradients of parameters that required them when it was made.
    """
    state = net.state_dict().items() if with_buffers else net.named_parameters()
    norms = {f"{name} {x.double().norm():.6g}" for name, x in state if torch.is_tensor(x)}
    require_equal(norms, "the ranks' nets differ (unused, unfrozen after DDP, changed in forward?)")


# ---- 4. The loop
def make_loaders(args, train_set, val_set, device):
    """Return (train_loader, val_loader) of this rank. Raises ValueError for too few samples."""
    share = args.global_batch_size // dist.get_world_size()  # main() allows no remainder.
    if len(train_set) < args.global_batch_size:
        raise ValueError("--global-batch-size is larger than the training set")
    options = {
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,  # Starting workers takes seconds.
        "worker_init_fn": end_with_parent,
        "pin_memory": device.type == "cuda",
    }
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    # A DistributedSampler would repeat samples here, which falsifies the means
    # (pytorch/pytorch#25162). Instead each rank takes every world_size-th sample.
    val_sampler = range(dist.get_rank(), len(val_set), dist.get_world_size())  # RANKS DIFFER
    val_loader = DataLoader(val_set, args.micro_batch_size or share, sampler=val_sampler, **options)
    return train_loader, val_loader


def train(args, device):
    """Train and evaluate. Every rank runs this function."""
    rank, path = dist.get_rank(), args.checkpoint

    # Make the same task on every rank.
    seed_generators(args.seed)
    train_set, val_set, net, optimizer = make_task(args, device)
    train_set, val_set = SeededItems(train_set, args.seed), SeededItems(val_set, args.seed + 1)
    train_loader, val_loader = make_loaders(args, train_set, val_set, device)
    if not args.local_bn:
        net = convert_batch_norm(net)  # The optimizer's parameters stay in it.
    base_lrs = [group["lr"] for group in optimizer.param_groups]  # before resume() changes them

    # Go on where the checkpoint ends. Its sums let the printed means cover the whole epoch.
    parts = {"net": net, "optimizer": optimizer}  # An average of the net would be one more part.
    identity = identify(args, train_set, net, optimizer)
    first_epoch, samples_read, sums = resume(path, identity, parts)  # RANKS MEET
    sums = sums.to(device)
    model = DistributedDataParallel(net)  # RANKS MEET: all get the parameters of rank 0.
    # Only evaluate() broadcasts buffers from here on. (The argument is deprecated since 2.13.)
    model.broadcast_buffers = False
    if rank == 0:  # RANKS DIFFER
        if first_epoch or samples_read:
            print(f"resuming {path} at epoch {first_epoch}/{args.epochs}, sample {samples_read}")
        if path:  # A failure is better told now than after an epoch.
            save_checkpoint(path, identity, parts, (first_epoch, samples_read, sums))

    for epoch in range(first_epoch, args.epochs):
        train_loader.sampler.set_epoch(epoch, samples_read)  # Otherwise all epochs have one order.
        train_set.epoch.fill_(epoch)  # for random items (chapter 7)
        start_time = time.perf_counter()
        samples_at_start = samples_read
        model.train()
        for batch in watched(train_loader, args.timeout):
            factor = lr_factor(args, epoch + samples_read / len(train_set))
            for group, lr in zip(optimizer.param_groups, base_lrs):
                group["lr"] = lr * float(factor)
            seed_generators(args.seed, epoch, samples_read, rank)  # RANKS DIFFER in dropout.
            sums += train_step(  # RANKS MEET
                model, optimizer, batch, args.micro_batch_size, args.clip_grad_norm, args.amp
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
        # With --local-bn each rank has its own buffers. RANKS MEET here and in evaluate().
        check_copies(net, not args.local_bn)
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
    local_rank = int(os.environ.get("LOCAL_RANK", rank))  # its number on this machine
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    end_with_parent()
    faulthandler.enable()  # A crash in C code prints its stack.
    sys.stdout.reconfigure(line_buffering=True)  # Otherwise lines reach a file late.
    num_gpus = torch.cuda.device_count()
    device = torch.device("cpu")
    if num_gpus:
        device = torch.device(f"cuda:{local_rank % num_gpus}")  # RANKS DIFFER
        torch.cuda.set_device(device)
    if world_size == local_world_size:  # One machine, so the loopback interface is enough.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # NCCL needs a GPU for each rank. With gloo, ranks can share one.
    backend = "nccl" if local_world_size <= num_gpus else "gloo"
    timeout = timedelta(seconds=args.timeout + 20)  # The watchdog (chapter 9) acts earlier.
    dist.init_process_group(backend, init_method, timeout, world_size, rank)  # RANKS MEET
    restart_watchdog(args.timeout)
    if rank == 0:  # RANKS DIFFER
        job = f"world size {world_size}, {device.type}, global batch size {args.global_batch_size}"
        print(f"ddp on {backend}, {job}, torch {torch.__version__}")
        if num_gpus and backend == "gloo":
            warnings.warn("ranks share GPUs: start fewer, or let each see all GPUs")
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
    if args.global_batch_size % world_size:
        refuse("--global-batch-size must be a multiple of the number of processes")
    if args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint-every needs --checkpoint")

    if under_torchrun:
        # A loader worker forked from a rank, which has threads, may hang (see DDP's
        # documentation). Ranks of mp.spawn() spawn theirs anyway.
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

    A checksum of norms of eight samples stands for the data. Raises ValueError if a sample differs
    when read again, or the net lacks a parameter of the optimizer.
    """
    indices = np.random.default_rng(0).integers(len(train_set), size=8).tolist()
    # Read in a worker if there are any: a file opened here could not be sent to workers.
    num_workers = min(args.num_workers, 1)
    batches = DataLoader(
        train_set, sampler=indices * 2, num_workers=num_workers, worker_init_fn=end_with_parent
    )
    norms = [[f"{x.double().norm():.6g}" for x in batch if torch.is_tensor(x)] for batch in batches]
    if norms[:8] != norms[8:]:
        raise ValueError("an item differs when read again: make_task() says what it may draw")
    names = {parameter: name for name, parameter in net.named_parameters()}
    parameters = [names.get(p) for group in optimizer.param_groups for p in group["params"]]
    if None in parameters:
        raise ValueError("the optimizer has a parameter that the net lacks: add it to the net")
    data = zlib.crc32(repr(norms).encode())
    options = [f"{args.seed=}", f"{args.global_batch_size=}", f"{len(train_set)=}", f"{data=}"]
    return [*options, f"{SUMS=}", f"optimizer {type(optimizer).__name__}", f"{parameters=}"]


def save_checkpoint(path, identity, parts, progress):
    """Write a checkpoint, on rank 0 alone. A crash leaves the old file or the new one, never half.

    identity: texts that resume() compares. parts: a dictionary of objects with a state_dict().
    progress: (epoch, samples_read, sums). Raises FloatingPointError if the net is not finite (so
    register a mask of -inf with persistent=False), and OSError if the file cannot be written or
    loaded again. Then the old file stays.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, value in states["net"].items():
        if torch.is_tensor(value) and not value.isfinite().all():
            raise FloatingPointError(f"{name} is not finite, so nothing was written to {path}")
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save({"identity": identity, "progress": progress, **states}, file)
            file.flush()
            os.fsync(file)  # Otherwise a crash of the machine may leave an empty file.
        # This fails where resume() would, as when another job writes it, too.
        torch.load(f"{path}.tmp", map_location="cpu", weights_only=True, mmap=True)
        os.replace(f"{path}.tmp", path)
    except Exception as error:
        reason = error
        while reason.__context__:  # PyTorch's own error hides the first one, such as a full disk.
            reason = reason.__context__
        raise OSError(f"nothing was written to {path}: {reason!r:.300}") from error


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
            raise ValueError(f"{path} is damaged or of another job: {error!r:.200}") from error
    require_equal(  # RANKS MEET before rank 0 writes.
        {*identity, f"(epoch, sample) {progress[:2]}"},
        f"the ranks have unequal data, or do not all find {path}",
    )
    return progress


# ---- 7. Random numbers
def seed_generators(seed, *place):
    """Seed the generators of PyTorch, NumPy and Python for a place in the training.

    The place of an item is (epoch, index), that of a step (epoch, samples_read, rank).
    So no checkpoint has to hold the state of a generator.
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


# ---- 8. BatchNorm over the job
def convert_batch_norm(net):
    """Return the net with BatchNorm layers that see the samples of all ranks in training.

    On GPUs they become nn.SyncBatchNorm. On CPUs each rank gathers all samples (of equal shape)
    before a layer, and keeps its own after it. Raises TypeError on GPUs for a subclass, whose
    additions nn.SyncBatchNorm would drop.
    """
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [layer for layer in net.modules() if isinstance(layer, batch_norms)]
    if next(net.parameters()).is_cuda:
        if others := set(map(type, layers)).difference(batch_norms):
            raise TypeError(f"nn.SyncBatchNorm cannot replace {others}: use --local-bn")
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for layer in layers:
        layer.register_forward_pre_hook(gather_samples)
        layer.register_forward_hook(keep_own_samples)
    return net


class AllGather(torch.autograd.Function):
    """Join all ranks' samples. Each affects every rank's loss, so in the backward pass each rank
    gets the gradients of its own samples from all ranks, and adds them up.
    """

    @staticmethod
    def forward(context, x):
        shares = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather(list(shares), x.contiguous())  # RANKS MEET
        return shares.flatten(0, 1)

    @staticmethod
    def backward(context, gradient):
        received = gradient.new_empty(gradient.shape)
        dist.all_to_all_single(received, gradient.contiguous())  # RANKS MEET: part r goes to r.
        return sum(received.chunk(dist.get_world_size()))


def gather_samples(layer, inputs):
    """Before a BatchNorm layer: replace this rank's samples by those of all ranks."""
    if layer.training:
        return AllGather.apply(*inputs)


def keep_own_samples(layer, inputs, output):
    """After a BatchNorm layer: keep this rank's part of the output."""
    if layer.training:
        # A piece of chunk() would refuse operations in place, such as nn.ReLU(inplace=True).
        shares = output.unflatten(0, (dist.get_world_size(), -1))
        return shares[dist.get_rank()]  # RANKS DIFFER


# ---- 9. Hangs, and processes that are left over
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
