"""Train a net on several GPUs with PyTorch, in one file to run, read, copy and edit.

    bash run.sh    # a process for each GPU, or two on the CPU (bash run.sh --help: the options)
    torchrun --standalone --nproc-per-node=4 ddp_reference.py    # with PyTorch's launcher

In most scripts for several GPUs, the number of processes changes the result, because the batch size
is set for each process, and each has its own BatchNorm statistics and random numbers. Here, the
batch of a step is cut into a fixed number of shares, and any number of processes that divides the
number of shares gives the same result, except for rounding. Only the speed changes. So you can
debug on one GPU what went wrong on eight, compare a run on two GPUs with one on four, and go on
from a checkpoint with four GPUs if the other four fail.

Each GPU gets a process. Processes are numbered from 0, and both the number and the process are
called a rank. The number of ranks is the world size. Every rank holds a copy of the net. The
samples of a step, its global batch, are divided into the shares (micro-batches), and these are
dealt to the ranks. A rank runs a forward and a backward pass for each of its shares, one after the
other, and so adds up their gradients. During the last backward pass of a step,
DistributedDataParallel (DDP) averages each gradient over the ranks as soon as it is complete. Then
all ranks take the same optimizer step, so the copies stay equal.

This is gradient accumulation. But the samples, the random numbers and the BatchNorm statistics of a
share depend only on which share of which step it is, never on the rank that computes it. So the
number of ranks does not matter on GPUs of one kind, except for rounding, which grows over the
steps. The price is that even a single GPU computes one share at a time, which is slower than the
whole batch at once, and that BatchNorm sees only one share at a time.

By default there are 8 shares. If the number of ranks does not divide 8, there is one share for each
rank instead, which gives another result. With one share for each rank, and equally many labels in
each, a step is that of plain DDP.

Collectives are calls that all ranks must make, in the same order. They are marked RANKS MEET. An
all-reduce replaces every rank's tensor by the sum of all, and a broadcast replaces it by that of
one rank. If a rank skips a collective, the others wait for it until --timeout ends the job. Or,
worse, their call is paired with a later collective of that rank, and the data get mixed up without
an error. RANKS DIFFER marks lines in which a rank does something of its own.

The results of two kinds of nets still depend on the number of ranks: nets that call collectives
themselves, as nn.SyncBatchNorm does, and nets that keep state outside of their parameters and
buffers.

The chapters are: 1. your task, which you edit; 2. the data; 3. training; 4. checkpoints; 5. the
processes. At the end, main() starts the ranks. Each calls run_rank(), which calls train(), which
calls train_step() for each step. To learn about DDP, read train() and train_step() first.
"""

import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from argparse import SUPPRESS, ArgumentParser
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # Without it, processes may crash at their end: pytorch/pytorch#190489
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset


# ---- 1. Your task: the data, the net, the loss, the learning rate, the options. Edit this chapter.
class SyntheticDataset(TensorDataset):
    """Random x, float32 (3, L), and labels y, int64 (L,).

    The label of a position is the channel with the largest mean over that position and its two
    neighbours.
    """

    def __init__(self, num_samples, length, seed):
        x = torch.randn(num_samples, 3, length, generator=torch.Generator().manual_seed(seed))
        local_means = F.avg_pool1d(x, kernel_size=3, stride=1, padding=1)
        super().__init__(x, local_means.max(dim=1).indices)


class ConvNet(nn.Sequential):
    """Conv1d layers with BatchNorm1d: float32 (N, 3, L) to logits (N, 3, L)."""

    def __init__(self):
        super().__init__(
            nn.Conv1d(3, 16, 3, padding=1, bias=False),  # BatchNorm would remove a bias.
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 3, 3, padding=1),
        )


def make_task(args, device):
    """Return (train_set, val_set, net, optimizer), which must be equal on all ranks.

    The ranks are seeded alike, so random weights are equal.
    """
    train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
    val_set = SyntheticDataset(125, args.length, args.seed + 1)
    net = ConvNet().to(device)
    return train_set, val_set, net, torch.optim.Adam(net.parameters(), lr=args.lr)


def lr_factor(args, epochs_done):
    """Return the factor for the optimizer's initial learning rates.

    epochs_done: a float, which is 2.5 in the middle of the third epoch.
    """
    return 1.0  # To warm up from a tenth, over an epoch: min(1.0, epochs_done + 0.1)


METRICS = ("loss", "accuracy")  # What batch_sums() returns, in this order. The first is minimized.


def count_labels(batch):
    """Return the number of labels in a batch: an int, or a tensor of shape ().

    A position with -100, the ignore_index of F.cross_entropy(), has no label.
    """
    x, y = batch
    return (y != -100).sum()


def batch_sums(model, batch, amp):
    """Return the METRICS, summed over the labels of a batch: float64 (2,).

    model: the net, which in training is wrapped by DDP.

    Sums of batches can be added up. Means cannot, because batches may differ in their numbers of
    labels.
    """
    device = next(model.parameters()).device
    x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y, reduction="sum")  # bfloat16 is too coarse for sums.
    correct = (logits.max(dim=1).indices == y).sum()  # argmax() is much slower on a CPU.
    return torch.stack([loss.double(), correct.double()])


def positive(text):
    """Return an option's text as an int that is at least 1, or raise ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def make_parser():
    """Return the parser of the command line."""
    parser = ArgumentParser(usage=SUPPRESS)  # Otherwise an error would print all options first.
    add = parser.add_argument
    nproc = torch.cuda.device_count() or 2
    add("--nproc-per-node", type=positive, default=nproc, help="processes to start (%(default)s)")
    add("--num-workers", type=int, default=0, help="loader processes of a rank (%(default)s)")
    add("--epochs", type=positive, default=6, help="passes over the data (%(default)s)")
    add("--global-batch-size", type=positive, help="samples of a step (some 240)")
    add("--shares", type=positive, help="parts of a step (8 if possible)")
    add("--lr", type=float, default=0.01, help="learning rate (%(default)s)")
    add("--clip-grad-norm", type=float, default=0.0, help="norm to clip gradients to (0: off)")
    add("--amp", action="store_true", help="compute in bfloat16 where torch.autocast() does")
    add("--seed", type=int, default=0, help="seed of all random numbers (%(default)s)")
    add("--checkpoint", help="file to which the job is saved, and from which it goes on")
    add("--checkpoint-every", type=positive, help="save not only after an epoch, but every N steps")
    add("--log-every", type=positive, default=4, help="print every so many steps (%(default)s)")
    add("--timeout", type=positive, default=600, help="seconds to wait for a rank (%(default)s)")
    add("--num-samples", type=positive, default=1200, help="synthetic signals (%(default)s)")
    add("--length", type=positive, default=1000, help="length of a signal (%(default)s)")
    return parser


# ---- 2. The data: which samples a rank reads, and which random numbers are drawn for them
class DistributedSampler(Sampler):
    """Like torch.utils.data.DistributedSampler, but it can begin in the middle of an epoch.

    All W ranks (num_replicas) shuffle alike, by seed + epoch, and rank r reads the positions r,
    r + W, r + 2W, ... of that order. So if each rank reads its next B / W samples, they have
    together read the next B samples of the order, whatever W is. If W does not divide the number of
    samples, the first ones of the order are read again, or with drop_last the last ones are left
    out.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"there is no rank {self.rank} of {self.num_replicas}")
        self.shuffle = shuffle
        self.seed = seed
        round_up = 0 if drop_last else self.num_replicas - 1  # in the division below
        self.num_samples = (len(dataset) + round_up) // self.num_replicas  # of a rank
        self.set_epoch(0)

    def set_epoch(self, epoch, samples_read=0):
        """Choose an epoch, and skip its first samples_read samples, which the ranks have read."""
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
            if self.was_read:  # Without set_epoch(), all epochs are alike (pytorch/pytorch#31771).
                warnings.warn("this order was read before: call set_epoch(epoch)")
            self.was_read = True
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator, dtype=torch.int32)
            # A memoryview yields ints, as a list does, but needs far less memory.
            order = memoryview(order.numpy())
        total_size = self.num_samples * self.num_replicas
        for position in range(self.samples_read + self.rank, total_size, self.num_replicas):
            yield order[position % len(order)]  # RANKS DIFFER in the position.


def seed_generators(seed, *place):
    """Seed PyTorch, NumPy and Python by the seed and by a place in the training.

    place: (epoch, index) for a sample, (epoch, samples_read, share) for a share, (batch,) in
    evaluation, and () before the training.

    Because generators are seeded at each place, no checkpoint has to hold their states.
    """
    # SeedSequence derives three independent seeds from the seed and the place. (With one seed for
    # all generators, PyTorch and NumPy would draw the same bits.)
    sequence = np.random.SeedSequence(seed, spawn_key=place)
    torch_seed, numpy_seed, python_seed = sequence.generate_state(3).tolist()
    torch.default_generator.manual_seed(torch_seed)  # torch.manual_seed() is slower.
    if torch.cuda.is_initialized():  # in a rank that has a GPU, but not in its loader workers
        torch.cuda.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)


class SeededItems(Dataset):
    """A data set that seeds the generators before it reads a sample, by its epoch and index.

    So augmentation does not depend on the process that reads the sample. The data set is indexed by
    (epoch, index), because a loader worker is told nothing else of the epoch. Without loader
    workers, it seeds the generators of the rank itself, which does no harm, as train_step() seeds
    them again.
    """

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, place):
        epoch, index = place
        seed_generators(self.seed, epoch, index)
        return self.dataset[index]


class EpochBatchSampler(BatchSampler):
    """The batches of a DistributedSampler, as lists of (epoch, index) for SeededItems."""

    def __iter__(self):
        for indices in super().__iter__():
            yield [(self.sampler.epoch, index) for index in indices]


def collate_shares(shares, items):
    """Divide the items that this rank has read for a step: return {share: batch}.

    Of 8 shares, share s has the samples at the positions s, s + 8, s + 16, ... of a step. With 2
    ranks, rank 1 reads the positions 1, 3, 5, ..., so each of its 4 shares gets every fourth item:

        position  1 3 5 7 9 11 13 15 ...
        share     1 3 5 7 1  3  5  7 ...
    """
    batches = {}
    for index, share in enumerate(shares):
        batches[share] = torch.utils.data.default_collate(items[index :: len(shares)])
    return batches


def make_loaders(args, train_set, val_set):
    """Return this rank's (sampler, train_loader, val_loader).

    train_loader yields {share: batch} for a step, and val_loader yields batches.
    """
    if args.global_batch_size > len(train_set):
        raise ValueError(f"--global-batch-size is larger than the {len(train_set)} samples")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = range(rank, args.shares, world_size)  # RANKS DIFFER: the shares of this rank
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # The sampler's drop_last and that of the batches together leave out the samples at the end of
    # the order that do not fill a step, which are the same on any number of ranks.
    train_batches = EpochBatchSampler(sampler, args.global_batch_size // world_size, drop_last=True)
    # For validation, a DistributedSampler would count some samples twice (pytorch/pytorch#25162).
    # Instead, each rank takes every world_size-th batch: of 5 batches, rank 0 of 2 takes 0, 2 and
    # 4, and rank 1 takes 1 and 3. A batch has the size of a share. The epoch is always 0, so that
    # all evaluations draw the same random numbers.
    share_size = args.global_batch_size // args.shares
    val_batches = []
    for start in range(rank * share_size, len(val_set), world_size * share_size):  # RANKS DIFFER
        indices = range(len(val_set))[start : start + share_size]
        val_batches.append([(0, index) for index in indices])

    options = {"pin_memory": torch.cuda.is_available()}
    if args.num_workers > 0:
        # Forking a process that has threads, as a rank has, may hang (see DDP's documentation).
        # Spawning a worker takes seconds, so workers persist.
        options |= {"multiprocessing_context": "spawn", "persistent_workers": True}
    train_loader = DataLoader(
        SeededItems(train_set, args.seed),
        batch_sampler=train_batches,
        collate_fn=partial(collate_shares, shares),
        num_workers=args.num_workers,
        **options,
    )
    val_loader = DataLoader(
        SeededItems(val_set, args.seed + 1),  # with other random numbers than in training
        batch_sampler=val_batches,
        num_workers=min(args.num_workers, 2),  # Few, as they need memory even while the net trains.
        **options,
    )
    return sampler, train_loader, val_loader


# ---- 3. Training
def train(args, device):
    """Train and evaluate. Every rank runs this function."""
    rank, path = dist.get_rank(), args.checkpoint
    seed_generators(args.seed)  # All ranks draw the same first weights.
    train_set, val_set, net, optimizer = make_task(args, device)
    # The initial rates are read now, because load_checkpoint() loads the rates of a later step.
    initial_lrs = [group["lr"] for group in optimizer.param_groups]
    sampler, train_loader, val_loader = make_loaders(args, train_set, val_set)

    # load_checkpoint() makes sure that all ranks, and the job that wrote the checkpoint, have the
    # same settings. (The learning rate is not among them, so a job may go on with another one.)
    settings = {
        "seed": args.seed,
        "shares": args.shares,
        "global batch size": args.global_batch_size,
        "training samples": len(train_set),
        "validation samples": len(val_set),
        "optimizer": type(optimizer).__name__,
        "metrics": METRICS,
    }
    parts = {"net": net, "optimizer": optimizer}  # Add what else is to be saved, such as an EMA.
    # The sums are those of the epoch so far: the number of labels, and then the batch_sums().
    first_epoch, samples_read, sums = load_checkpoint(path, settings, parts)  # RANKS MEET
    sums = sums.to(device)
    if path and rank == 0:  # RANKS DIFFER
        print(f"{path}: epoch {first_epoch}/{args.epochs}, sample {samples_read}/{len(train_set)}")
    if first_epoch == samples_read == 0:  # so that a wrong path ends the job before it has trained
        save_checkpoint(path, settings, parts, first_epoch, samples_read, sums)

    # model(x) returns what net(x) does, but its backward passes also average the gradients. So
    # training must call the model, and not the net, which is model.module. DDP joins the gradients
    # into a few large tensors (buckets), and averages a bucket as soon as all of its gradients are
    # there. With gradient_as_bucket_view, parameter.grad is a part of the bucket, not a copy. Each
    # parameter must get a gradient. If some may get none, add find_unused_parameters=True.
    # RANKS MEET: all get rank 0's parameters and buffers.
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    # By default, DDP broadcasts rank 0's buffers before each forward pass. train_step() does so at
    # its end, so that all ranks evaluate the net that is saved. (The constructor's argument of this
    # name is deprecated, and would also leave out the buffers in the line above.)
    model.broadcast_buffers = False

    for epoch in range(first_epoch, args.epochs):
        start_time, samples_at_start = time.perf_counter(), samples_read
        sampler.set_epoch(epoch, samples_read)  # Without this, all epochs have the same order.
        model.train()
        # If an item raises StopIteration, next() raises it, too. A for loop over the loader would
        # take it for the end of the epoch, and the other ranks would wait for this one.
        step_batches = iter(train_loader)
        for _ in range(len(train_loader)):  # the steps that are left of the epoch
            factor = lr_factor(args, epoch + samples_read / len(train_set))
            for group, initial_lr in zip(optimizer.param_groups, initial_lrs):
                # The checkpoint holds the rate, and torch.load() would refuse a NumPy number.
                group["lr"] = initial_lr * float(factor)
            batches = next(step_batches)  # RANKS DIFFER
            seeds = (args.seed, epoch, samples_read)
            clip = args.clip_grad_norm
            sums += train_step(model, optimizer, batches, seeds, clip, args.amp)  # RANKS MEET
            samples_read += args.global_batch_size
            step = samples_read // args.global_batch_size
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                save_checkpoint(path, settings, parts, epoch, samples_read, sums)
            if rank == 0 and step % args.log_every == 0:  # RANKS DIFFER
                print(f"epoch {epoch} | {samples_read}/{len(train_set)} | {named_means(sums)}")

        means = named_means(sums)  # This waits for the GPU, so the clock is read after it.
        speed = (samples_read - samples_at_start) / (time.perf_counter() - start_time)
        check_copies(net)  # RANKS MEET
        val_sums = evaluate(net, val_loader, args.seed, args.amp)  # RANKS MEET
        val_means = named_means(val_sums, prefix="val_")
        samples_read = 0
        sums.zero_()
        save_checkpoint(path, settings, parts, epoch + 1, samples_read, sums)
        if rank == 0:  # RANKS DIFFER
            print(f"epoch {epoch} | {means} | {val_means} | {speed:.1f} samples/s")


def train_step(model, optimizer, batches, seeds, clip_grad_norm=0, amp=False):
    """Take one optimizer step. Return the global batch's number of labels and sums: float64 (3,).

    The ranks meet to count the labels, to average the gradients (in the last backward pass), to get
    rank 0's buffers, and to add up the sums.

    batches: {share: batch}. All ranks have equally many, and rank 0 has share 0.
    seeds: (seed, epoch, samples_read), for seed_generators(*seeds, share).
    """
    net, device = model.module, next(model.parameters()).device
    # A step minimizes the mean over all labels of the global batch. If ranks have unequally many,
    # the mean of their means would weigh labels unequally (huggingface/transformers#34242).
    num_labels = torch.as_tensor(sum(count_labels(batch) for batch in batches.values()))
    num_labels = num_labels.to(device, torch.float64, non_blocking=True)
    # With async_op, the ranks' counts are added up while this rank is at its first forward pass.
    counting = dist.all_reduce(num_labels, async_op=True)  # RANKS MEET

    # Forward passes change buffers, such as BatchNorm's running means. Plain DDP keeps the changes
    # by rank 0, and we keep those by share 0: each share starts from the buffers before this step,
    # rank 0 computes share 0 at the end, and then all ranks get the buffers of rank 0.
    shares = sorted(batches, reverse=True)
    start_buffers = [buffer.clone() for buffer in net.buffers()] if len(shares) > 1 else []
    num_shares = dist.get_world_size() * len(batches)  # of all ranks
    step_sums = 0
    model.zero_grad()  # It comes first, as the step of another net (in a GAN) may leave gradients.
    for share in shares:
        if share != shares[0]:
            for buffer, start_buffer in zip(net.buffers(), start_buffers, strict=True):
                buffer.copy_(start_buffer)
        seed_generators(*seeds, share)  # RANKS DIFFER in random numbers, such as dropout's.
        is_last = share == shares[-1]
        # A backward pass adds to the gradients, and the last one also averages these sums over the
        # ranks. In the others, no_sync() switches the averaging off. It must also enclose the
        # forward pass, in which DDP decides whether the backward pass will average.
        with nullcontext() if is_last else model.no_sync():
            share_sums = batch_sums(model, batches[share], amp)
            counting.wait()  # From here on, num_labels is that of all ranks.
            # The gradient should be the sum over all shares, divided by num_labels. But DDP divides
            # by the number of ranks, and we divide by the number of a rank's shares, after the last
            # pass: together, by num_shares. To undo this, the loss is multiplied by num_shares.
            # (The clamp is for steps without labels, where 0 * inf would be nan.)
            scale = num_shares / num_labels.clamp(min=1e-9)
            loss = share_sums[0] * scale
            loss.backward()  # RANKS MEET in the last one.
        step_sums += share_sums.detach()
    # This division is not part of the scale, because the gradients that hooks see
    # (parameter.register_hook()) would then be smaller on fewer ranks.
    if len(shares) > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(shares)

    if clip_grad_norm > 0:  # All ranks have the same gradients now, and so the same norm.
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    broadcast_buffers(net)  # RANKS MEET: all get rank 0's, which are those of share 0.
    dist.all_reduce(step_sums)  # RANKS MEET
    return torch.cat([num_labels.view(1), step_sums])


@torch.no_grad()
def evaluate(net, loader, seed, amp=False):
    """Return the number of labels and the sums over the batches of all ranks: float64 (3,).

    net: the net without DDP, because a DDP model may call collectives, and ranks may have unequal
    numbers of batches. It is left in eval mode.
    """
    net.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(net.parameters()).device
    sums = torch.zeros(1 + len(METRICS), dtype=torch.float64, device=device)
    batches = iter(loader)  # next() lets a StopIteration of an item be an error, as in train().
    # Ranks may have unequal numbers of batches, so there is no collective in the loop.
    for index in range(len(loader)):
        batch = next(batches)
        # Random numbers of the net follow from the position of the batch in the validation set.
        seed_generators(seed, rank + index * world_size)  # RANKS DIFFER
        sums[0] += count_labels(batch)
        sums[1:] += batch_sums(net, batch, amp)
    dist.all_reduce(sums)  # RANKS MEET
    return sums


def named_means(sums, prefix=""):
    """Return the means over the labels as a text: "loss 0.50000 accuracy 0.75000"."""
    means = sums[1:] / sums[0]
    return " ".join(f"{prefix}{name} {mean:#.5g}" for name, mean in zip(METRICS, means))


@torch.no_grad()
def broadcast_buffers(net):
    """Give all ranks the buffers of rank 0. One broadcast for each dtype is faster than many."""
    # A dict has the same order on all ranks. A set may not, and would mix up the broadcasts.
    for dtype in dict.fromkeys(buffer.dtype for buffer in net.buffers()):
        buffers = [buffer for buffer in net.buffers() if buffer.dtype == dtype]
        joined = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(joined, src=0)  # RANKS MEET
        for buffer, part in zip(buffers, joined.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(part.view_as(buffer))


@torch.no_grad()
def check_copies(net):
    """Raise RuntimeError if a parameter is nan, or differs from rank 0's by more than rounding.

    Copies drift apart if training calls net(x) in place of model(x), or if a parameter that did not
    require gradients when DDP was made is trained later. On GPUs of different kinds, they also
    drift apart by rounding.
    """
    for name, parameter in net.named_parameters():
        expected = parameter.contiguous().clone()
        dist.broadcast(expected, src=0)  # RANKS MEET
        if not (parameter - expected).norm() <= 1e-4 * expected.norm():  # also for a nan
            raise RuntimeError(
                f"{name} is nan, or differs from rank 0's because its gradients are not averaged"
            )


# ---- 4. Checkpoints
def save_checkpoint(path, settings, parts, epoch, samples_read, sums):
    """Let rank 0 write a file, unless path is None. A crash leaves the old file or the new one.

    parts: a dict of objects with a state_dict(). One is called "net".
    """
    if not path or dist.get_rank() > 0:  # RANKS DIFFER
        return
    checkpoint = {name: part.state_dict() for name, part in parts.items()}
    net = parts["net"]
    damaged = [name for name, parameter in net.named_parameters() if not parameter.isfinite().all()]
    # Buffers may be infinite, as masks often are.
    damaged += [name for name, buffer in net.named_buffers() if buffer.isnan().any()]
    if damaged:
        raise FloatingPointError(f"{damaged[0]} is nan or infinite, so {path} was not written")
    checkpoint |= {"settings": settings, "epoch": epoch, "samples_read": samples_read, "sums": sums}
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file)  # Otherwise a crash of the machine may leave an empty file.
    os.replace(temporary, path)


def load_checkpoint(path, settings, parts):
    """Load the file, and return its (epoch, samples_read, sums), or zeros if there is none.

    Raises ValueError if the file is damaged or of another job, or if ranks have loaded files of
    different steps or have different settings.
    """
    epoch, samples_read, sums = 0, 0, torch.zeros(1 + len(METRICS), dtype=torch.float64)
    if path:
        try:
            # With mmap, the ranks of a machine share the memory for the file.
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            file_settings = checkpoint["settings"]
        except FileNotFoundError:
            pass  # This is a new job.
        except Exception as error:  # Training from the start would replace the file.
            raise ValueError(f"cannot load {path} (if it is damaged, move it away)") from error
        else:
            if file_settings != settings:
                differing = {}
                for name in settings | file_settings:
                    if settings.get(name) != file_settings.get(name):
                        differing[name] = file_settings.get(name)
                raise ValueError(f"{path} is of a job with other settings: it has {differing}")
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            epoch, samples_read = checkpoint["epoch"], checkpoint["samples_read"]
            sums = checkpoint["sums"]
    # With several machines, some ranks may have found no file, or an older one, or other data.
    state = settings | {"epoch": epoch, "samples read": samples_read}
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)  # RANKS MEET: each gets a list of all ranks' states.
    for rank, other in enumerate(states):
        if other != states[0]:
            differing = {k: v for k, v in other.items() if states[0][k] != v}
            raise ValueError(f"unlike rank 0, rank {rank} has {differing}")
    return epoch, samples_read, sums


# ---- 5. The processes
def run_rank(rank, world_size, args, init_method):
    """Run one rank: choose its device, connect it with the other ranks, and train."""
    # SIGINT shall end a rank at once. It comes from Ctrl-C, and from Linux if main() is killed,
    # because mp.spawn() asks for that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()  # A crash in C code prints the stack.
    # If a rank fails, the others get SIGTERM. Each then prints its stack, and with chain it ends.
    faulthandler.register(signal.SIGTERM, chain=True)
    sys.stdout.reconfigure(line_buffering=True)  # Otherwise lines reach a file late.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))  # the rank on this machine, from torchrun
    num_gpus = torch.cuda.device_count()
    device, backend = torch.device("cpu"), "gloo"  # the library by which CPUs communicate
    if num_gpus > 0:
        # RANKS DIFFER: each has its GPU. GPUs communicate by the library nccl.
        device, backend = torch.device("cuda", local_rank % num_gpus), "nccl"
        torch.cuda.set_device(device)
        if world_size > num_gpus and "LOCAL_RANK" not in os.environ:
            # There are more ranks than GPUs, as in a check on one GPU. NCCL refuses to let ranks
            # share a GPU, unless different NCCL_HOSTIDs make them look like different machines.
            os.environ["NCCL_HOSTID"] = str(rank)
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(backend, init_method, timeout, world_size, rank)  # RANKS MEET
    if rank == 0:  # RANKS DIFFER
        shares = f"{args.shares} shares ({args.shares // world_size} a rank)"
        batch = f"global batch size {args.global_batch_size} in {shares}"
        print(f"ddp on {backend}, world size {world_size}, {batch}, torch {torch.__version__}")
    train(args, device)
    dist.destroy_process_group()


def main():
    """Run one rank if torchrun has started this process, otherwise start --nproc-per-node ranks."""
    parser = make_parser()
    args = parser.parse_args()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if 0 < len(missing) < len(names):
        parser.error(f"set all of {', '.join(names)} or none: there is no {', '.join(missing)}")
    by_torchrun = not missing
    world_size = int(os.environ["WORLD_SIZE"]) if by_torchrun else args.nproc_per_node

    # These defaults suit any number of ranks.
    args.shares = args.shares or (8 if 8 % world_size == 0 else world_size)
    args.global_batch_size = args.global_batch_size or max(240 // args.shares, 1) * args.shares
    if args.shares % world_size:
        parser.error(f"{world_size} processes do not divide --shares {args.shares}")
    if args.global_batch_size % args.shares:
        parser.error(f"--shares {args.shares} must divide --global-batch-size")
    if args.seed < 0 or args.num_workers < 0:
        parser.error("--seed and --num-workers must not be negative")
    if args.checkpoint_every and not args.checkpoint:
        parser.error("--checkpoint-every needs --checkpoint")

    if by_torchrun:
        run_rank(int(os.environ["RANK"]), world_size, args, "env://")
        return
    # Ranks inherit these variables. By default, each rank would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // world_size)))
    # By default, each rank would listen on all networks. The loopback interface is enough.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    try:
        with tempfile.TemporaryDirectory() as folder:  # The ranks find each other by a file in it.
            # Each of these processes calls run_rank(rank, world_size, args, ...).
            mp.spawn(run_rank, (world_size, args, f"file://{folder}/store"), world_size)
    except KeyboardInterrupt:
        os._exit(130)  # the status after Ctrl-C. (sys.exit() would wait for the ranks.)


if __name__ == "__main__":
    main()
