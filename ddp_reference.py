"""Data-parallel training with PyTorch in one file: to run, to copy from and to read.

    bash run.sh                # train: one process per GPU (NCCL), or two on the CPU (gloo)
    bash run.sh cases          # which samples each rank reads
    bash run.sh --help         # the options
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

One process for each GPU runs this file. Each has a rank, counted from 0; how many there are is the
world size. Each has a copy of the net, and the copies stay equal: a step takes a global batch of
samples, of which each rank reads its share and computes it in one or more micro-batches. In the
backward DistributedDataParallel (DDP) averages the ranks' gradients, and then all ranks make the
same optimizer step. All ranks together are the job.

They meet in collectives, calls that every rank must make: an all-reduce gives all ranks the sum of
their tensors, a broadcast gives them rank 0's, an all-gather gives each everybody's. "DDP meet"
marks where ranks make such a call, "DDP differ" where one does something else than the others.
"""

import argparse
import contextlib
import dataclasses
import datetime
import glob
import hashlib
import io
import itertools
import json
import logging
import math
import os
import random
import re
import signal
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # If PyTorch imports it later, the exit aborts: pytorch/pytorch#190489.
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate


# ---- Your task: data, net, optimizer and loss. To train what is yours, change this part.
class SyntheticDataset(Dataset):
    """`num_samples` random signals with a label at every position.

    Item i is (x, y): x float32 (3, length), standard normal; y int64 (length,), the channel of x
    with the largest sum over the position and its two neighbours. It depends on (seed, i) alone.
    Raises IndexError outside [0, num_samples).
    """

    def __init__(self, num_samples=100, length=10000, seed=0):
        self.num_samples = num_samples
        self.length = length
        self.seed = seed

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


class ConvNet(nn.Sequential):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, num_classes, L).

    The convolutions have no bias, as BatchNorm would take it away again. The gradient of such a
    bias is only rounding error. It differs with the number of ranks, and Adam would make full steps
    of it.
    """

    def __init__(self, num_classes=3):
        super().__init__(
            nn.Conv1d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, num_classes, 3, padding=1, bias=False),
            nn.BatchNorm1d(num_classes),  # no ReLU: cross entropy takes logits of either sign
        )


def count_labels(y):
    """The number of labels in a batch, as an integer tensor without dimensions on y's device.

    Apart from batch_sums(), as train_step() needs it before it runs the net.
    """
    return (y != -100).sum()  # cross_entropy ignores labels of -100


def batch_sums(logits, y):
    """Return (loss_sum, correct): the sum of a batch's losses and the number of correct labels.

    logits (N, C, ...), y int64 (N, ...). Both results are tensors without dimensions on the device,
    the first with its graph. They are sums because means cannot be added up over ranks.
    """
    if y.is_floating_point():  # cross_entropy would take them for probabilities
        raise TypeError("labels must be integers; a regression has its own batch_sums")
    loss_sum = F.cross_entropy(logits, y, reduction="sum")
    predicted = logits.detach().max(dim=1).indices  # argmax takes ten times as long on a CPU
    return loss_sum, (predicted == y).sum()


@dataclasses.dataclass
class Task:
    """What a job trains. The first dimension of x, y and the module's output counts samples.

    train_set, val_set: map-style datasets of pairs (x, y), or IterableDatasets such as ShardStream,
        which must split themselves over ranks and loader workers. One to train on also has
        samples_per_epoch, over all ranks, and set_epoch(epoch, start).
    module, optimizer: the module, on the device. What DDP makes of it is called the model.
    count_labels, batch_sums: see these functions. metric: the name of what batch_sums counts.
    lr_factor: a function of the epochs done so far, a real number, by which each learning rate is
        multiplied. As it needs nothing else, a schedule is the same after any stop.
    collate_fn: of the DataLoader.
    """

    train_set: Dataset
    val_set: Dataset
    module: nn.Module
    optimizer: torch.optim.Optimizer
    count_labels: Callable = count_labels
    batch_sums: Callable = batch_sums
    lr_factor: Callable = lambda epochs: 1.0
    collate_fn: Callable = default_collate
    metric: str = "accuracy"


def make_task(args, device):
    """Return the Task that the command line's args describe; main() takes such a function of yours.

    Every process calls it, after PyTorch's, NumPy's and Python's generators were seeded alike: so a
    random split is the same everywhere. Files that are listed from a disk must be sorted.
    """
    if args.shards:
        epoch_and_step = args.samples_per_epoch, args.global_batch_size
        train_set = ShardStream(args.shards, *epoch_and_step, seed=args.seed)
        val_set = ShardStream(args.val_shards)
    else:
        train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
        val_set = SyntheticDataset(25, args.length, args.seed + 1)
    module = ConvNet().to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    return Task(train_set, val_set, module, optimizer)


# ---- Which samples a rank reads
def share_size(step_size, rank, num_replicas):
    """How many of a step's samples a rank reads: those at rank, rank + num_replicas, ..."""
    return len(range(rank, step_size, num_replicas))


class DistributedSampler(Sampler):
    """The indices that one rank reads in an epoch; num_replicas is torch's word for the world size.

    The epoch's order is a permutation of the dataset that depends on (seed, epoch) alone, so all
    ranks know it. global_batch_size is the number of samples of one step over all ranks. In each
    step its positions in the order are dealt out anew: of W ranks, rank r reads the step's
    positions r, r + W, r + 2W, ... So the steps are the same on any number of ranks, no sample is
    repeated, and one number, `start`, says how far the job has come.

    Without global_batch_size the indices are those of torch.utils.data.DistributedSampler, which
    repeats samples until all ranks have equally many. Arguments and attributes are torch's, too.
    This one needs 4 bytes a sample; torch's holds a list of integers (pytorch/pytorch#45427).

    drop_last: leave out a last step that is not full (without global_batch_size: one a rank).
    Raises ValueError for a rank or start out of range, TypeError for a dataset without a length.
    """

    def __init__(
        self,
        dataset,
        num_replicas=None,
        rank=None,
        shuffle=True,
        seed=0,
        drop_last=False,
        *,
        global_batch_size=None,
    ):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.global_batch_size = global_batch_size
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas}, counted from 0")
        self.set_epoch(0)

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order, without its first `start` samples: the job has read them."""
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"start is {start}, but must be in [0, {len(self.dataset)}]")
        self.epoch = epoch
        self.start = start
        self.step_size = self.global_batch_size or self.num_replicas  # torch deals out one a rank.
        self.total_size = len(self.dataset) - start
        if self.drop_last:
            self.total_size -= self.total_size % self.step_size
        elif self.global_batch_size is None:  # as torch does, up to the next multiple
            self.total_size += -self.total_size % self.num_replicas
        full_steps, rest = divmod(self.total_size, self.step_size)
        share = share_size(self.step_size, self.rank, self.num_replicas)
        self.num_samples = full_steps * share + share_size(rest, self.rank, self.num_replicas)
        self._passes = 0

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        self._passes += 1
        if self._passes == 2 and self.shuffle:  # torch stays silent: pytorch/pytorch#31771
            warnings.warn(
                f"second pass over the order of epoch {self.epoch}: call set_epoch(epoch) "
                "before each epoch, or every epoch has the same order",
                stacklevel=2,
            )
        n = len(self.dataset)
        dtype = torch.int32 if n < 2**31 else torch.int64
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(n, generator=generator, dtype=dtype)
        else:
            order = torch.arange(n, dtype=dtype)
        positions = order[self.start : self.start + self.total_size]
        # What torch repeats to fill up the last step. With global_batch_size this is nothing.
        repeated = order[torch.arange(self.total_size - len(positions)) % n]
        end = len(positions) - len(positions) % self.step_size
        full_steps = positions[:end].view(-1, self.step_size)
        last_step = torch.cat([positions[end:], repeated])
        of_full_steps = full_steps[:, self.rank :: self.num_replicas].flatten()  # DDP differ
        of_last_step = last_step[self.rank :: self.num_replicas]  # DDP differ
        mine = torch.cat([of_full_steps, of_last_step])
        del order, positions, full_steps, of_full_steps  # Only this rank's part stays in memory.
        for chunk in mine.split(8192):  # A list of all indices would take 36 bytes for each.
            yield from chunk.tolist()


def show_case(title, num_samples, with_sampler=True, new_order=False, drop_last=False):
    """Print the batches of 4 samples that each of two ranks reads in two epochs."""
    print(f"\ncase {title}\n{num_samples} samples, 2 ranks, batches of 4")
    for epoch in range(2):
        for rank in range(2):
            dataset = range(num_samples)
            sampler = DistributedSampler(dataset, 2, rank, drop_last=drop_last)
            sampler.set_epoch(epoch if new_order else 0)
            indices = sampler if with_sampler else dataset
            batches = torch.utils.data.BatchSampler(indices, 4, drop_last)
            print(f"  epoch {epoch}  rank {rank} ", *batches)


def show_cases():
    """Show the sampler at work, without global_batch_size, so that torch's does the same."""
    show_case("1: no sampler: every rank reads everything", 8, with_sampler=False)
    show_case("2: with the sampler: ranks split the data, the same way every epoch", 8)
    show_case("3: set_epoch: a new split each epoch", 8, new_order=True)
    show_case("4: 3 samples a rank: short batches are kept", 6)
    show_case("4, dropping the short batch: a batch of 4 never fills", 6, drop_last=True)
    show_case("5: 5 samples on 2 ranks: one is repeated to make 6", 5)
    show_case("5, with set_epoch: it is the first of that epoch's order", 5, new_order=True)
    show_case("6: last batches of one sample, which BatchNorm may refuse", 10)
    show_case("7: drop_last: that batch is gone", 10, drop_last=True)


# ---- A step of the job, and evaluation
def run_micro_batch(model, x, y, batch_sums, count_labels, amp):
    """Run the model forward on a micro-batch, with the loss: return (loss_sum, sums).

    loss_sum has its graph. sums has none: it is float64 (3,) on the device, the sum of the losses,
    of the correct labels and of the labels, to be added up over micro-batches, steps and ranks.

    A rank that has fewer micro-batches in a step than others runs a stand-in in their place, since
    all must take part in the collectives: x is one sample, and y is empty. It counts nowhere.
    """
    SyncBatchNorm.is_stand_in = len(y) == 0
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = model(x)  # DDP meet: before a step, rank 0's buffers, BatchNorm's statistics
        loss_sum, correct = batch_sums(logits[: len(y)], y)  # of a stand-in: of no logits
    sums = torch.stack([loss_sum.double(), correct, count_labels(y)])
    return loss_sum, sums.detach()


def train_step(
    model,
    optimizer,
    micro_batches,
    seed,
    clip_grad_norm=None,
    *,
    batch_sums=batch_sums,
    count_labels=count_labels,
    amp=False,
):
    """Make one optimizer step of the job, from this rank's share of the global batch.

    The gradient is that of the mean loss over all labels of the global batch, however they are
    spread over ranks and micro-batches. A mean of the means over each micro-batch would be another
    gradient wherever these have unequally many labels (huggingface/transformers#34242).

    All ranks call it equally often, with equally many micro_batches, a list of pairs (x, y), some
    of which may be stand-ins (see run_micro_batch). read_steps() gives such lists.
    seed: a tuple of integers from 0 on, the same on all ranks, and another for each step, such as
    the job's seed, the epoch, and the samples of it that have been read before.
    clip_grad_norm: scale the gradient down to this norm if it is larger.
    Returns this rank's sums, those of run_micro_batch(). Add them up over steps; all_reduce_sums()
    makes them the job's. Nothing here waits for a GPU, as .item() would.
    """
    num_labels = sum(count_labels(y) for _, y in micro_batches)
    pending = dist.all_reduce(num_labels, async_op=True)  # DDP meet: while the net runs
    seed_generators(*seed, 1 + dist.get_rank())  # DDP differ: dropout's masks
    sums = 0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # Only the last backward all-reduces. Before it no_sync() lets gradients add up here.
        # nn.DataParallel (--parallel dp) has no no_sync() and needs none.
        syncs = i == len(micro_batches) or not isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss_sum, micro_batch_sums = run_micro_batch(model, x, y, batch_sums, count_labels, amp)
            pending.wait()  # From here on num_labels counts the labels of all ranks.
            # DDP divides the sum of the gradients by the world size. The factor undoes that: what
            # is left is the sum over all ranks, divided by all labels. Without any label it is 0.
            loss = loss_sum * dist.get_world_size() / num_labels.clamp(min=1)
            loss.backward()  # DDP meet: all-reduce of the gradients, with the last micro-batch
        sums += micro_batch_sums
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    seed_generators(*seed)  # The same on all ranks, for an optimizer that draws random numbers.
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # See wrap(): gradients stay where DDP reduces them.
    return sums


def seed_generators(*numbers):
    """Seed PyTorch's, NumPy's and Python's generators by these integers from 0 on."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed(seed) takes 70 times as long.
    if torch.cuda.is_initialized():  # not in loader workers
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def all_reduce_sums(sums):
    """Return the sums of all ranks, added up, on the CPU; this waits for the device."""
    sums = sums.clone()
    dist.all_reduce(sums)
    return sums.cpu()


@torch.no_grad()
def evaluate(module, loader, device, batch_sums=batch_sums, count_labels=count_labels, amp=False):
    """Return [loss, accuracy] over the batches of all ranks; some ranks may have more than others.

    All ranks call it. Each sample is to be in a batch of one rank: a DistributedSampler without
    global_batch_size would repeat some.

    module: not the model, whose forward is a collective that a rank without a batch would miss. It
    is left in eval mode. Without any label both results are nan.
    """
    for buffer in module.buffers():
        received = buffer.clone()  # gloo sends a buffer that is a slice of a tensor wrongly.
        dist.broadcast(received, src=0)  # DDP meet: --local-bn gives each rank other statistics
        buffer.copy_(received)
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in loader:
        x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        sums += run_micro_batch(module, x, y, batch_sums, count_labels, amp)[1]
    job_sums = all_reduce_sums(sums)  # DDP meet
    return (job_sums[:2] / job_sums[2]).tolist()


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm that takes the statistics in training from the micro-batches of all ranks together.

    nn.SyncBatchNorm does so on GPUs only; this one runs everywhere, and a stand-in does not count.
    The ranks' statistics are put together by the formula of Chan, Golub and LeVeque ("Updating
    formulae and a pairwise algorithm for computing sample variances", 1979). A channel with a
    single value becomes 0, where nn.BatchNorm refuses it. sync_batch_norm() makes these layers.
    """

    is_stand_in = False  # For all layers. run_micro_batch() sets it, as a layer does not see y.

    def forward(self, x):
        """Normalise x, float (N, C, ...); in eval mode as nn.BatchNorm does."""
        if not self.training:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if not self.affine:
            weight, bias = torch.ones_like(self.running_var), torch.zeros_like(self.running_var)
        with torch.no_grad():
            count, mean, var = self.job_statistics(x)
            self.num_batches_tracked += 1
            momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            unbiased_var = var * count / (count - 1).clamp(min=1)
            self.running_mean += momentum * (mean - self.running_mean)
            self.running_var += momentum * (unbiased_var - self.running_var)
        return Normalize.apply(x, weight, bias, count, mean, var, self.eps, self.is_stand_in)

    def job_statistics(self, x):
        """Return (count, mean, var) of the values of all ranks, the latter two for each channel."""
        dtype = self.running_mean.dtype  # float32, also where autocast has made x bfloat16
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.new_full((1,), x.numel() / x.size(1), dtype=dtype)
        mean = x.sum(dims, dtype=dtype) / count
        one_a_channel = [1, -1] + [1] * (x.dim() - 2)
        squares = (x - mean.view(one_a_channel)).square_().sum(dims)
        statistics = torch.cat([count, mean, squares])
        if self.is_stand_in:
            statistics.zero_()
        of_ranks = [torch.empty_like(statistics) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, statistics)  # DDP meet
        counts, means, squares = torch.stack(of_ranks).split([1, len(mean), len(mean)], dim=1)
        job_count = counts.sum()
        job_mean = (counts * means).sum(0) / job_count
        job_squares = squares + counts * (means - job_mean).square()  # around the job's mean
        return job_count, job_mean, job_squares.sum(0) / job_count

    def _check_input_dim(self, x):
        """nn.BatchNorm1d, 2d and 3d ask here for their number of dimensions; any will do."""


class Normalize(torch.autograd.Function):
    """Normalise by given statistics, with a gradient that goes through the statistics, too.

    Let g be the gradient of the output, v the normalised x and n the count. For fixed statistics
    the gradient of x is weight / std * g. As each x moves mean and variance, too, it loses
    weight / std * (sum(g) + v * sum(g * v)) / n. The two sums, over all ranks, are the gradients
    of bias and weight. What this returns for these is of one rank; DDP adds them up.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, count, mean, var, eps, is_stand_in):
        """Return x, normalised, scaled and shifted."""
        ctx.save_for_backward(x, weight, count, mean, var)
        ctx.eps, ctx.is_stand_in = eps, is_stand_in
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx, grad):
        """Take PyTorch's gradients for fixed statistics, and add what x does by moving these."""
        x, weight, count, mean, var = ctx.saved_tensors
        x, grad = x.to(mean.dtype), grad.to(mean.dtype)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        of_all_ranks = torch.stack([grad_weight, grad_bias])
        dist.all_reduce(of_all_ranks)  # DDP meet
        if not ctx.is_stand_in:  # which moves neither mean nor variance
            # batch_norm computes v and applies both factors of what x loses.
            scale, shift = of_all_ranks * -weight * (var + ctx.eps).rsqrt() / count
            grad_x += F.batch_norm(x, mean, var, scale, shift, eps=ctx.eps)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def sync_batch_norm(module):
    """Turn a module's BatchNorm layers into SyncBatchNorm, in place; their parameters stay.

    Layers with a forward of their own, or without running statistics, are left as they are.
    """
    batch_norm = nn.modules.batchnorm._BatchNorm
    for layer in module.modules():
        if type(layer).forward is batch_norm.forward and layer.track_running_stats:
            layer.__class__ = SyncBatchNorm


# ---- The loop
def train(args, device, make_task, watchdog):
    """One rank's part of the job: train, evaluate, print and save, epoch by epoch.

    What it calls for saving, resuming and loading stands below, after the processes.
    """
    seed_generators(args.seed)  # All ranks make the same net, and the same random split.
    task = make_task(args, device)
    module, optimizer = task.module, task.optimizer
    base_groups = optimizer.state_dict()["param_groups"]  # as the task has made them

    identity = identify(task, args)  # what must be equal on all ranks, and after a stop
    refuse_unequal_ranks(identity, task, args)  # DDP meet: all-gather
    first_epoch, samples_read, earlier_sums = resume(identity, task, args)  # DDP meet: broadcast

    # Two samples, which settle_buckets() runs: BatchNorm may refuse one. One without its label is
    # the stand-in. They are rank 0's, as another rank may have no data to evaluate on.
    x, y = (tensor.to(device) for tensor in from_rank_0(first_sample_twice, task))  # DDP meet
    stand_in = x[:1], y[:0]
    options = {"batch_sums": task.batch_sums, "count_labels": task.count_labels, "amp": args.amp}
    model = wrap(module, x, y, options, args)
    loader = make_loader(task, device, args, training=True)
    val_loader = make_loader(task, device, args, training=False)
    num_samples = count_samples(task.train_set)
    sizes = args.global_batch_size, args.micro_batch_size
    clip_grad_norm = args.clip_grad_norm

    for epoch in range(first_epoch, args.epochs):
        watchdog.reset()
        start_epoch(loader, epoch, samples_read)  # before its workers begin to read
        steps = read_steps(loader, samples_read, num_samples, *sizes, stand_in, args.drop_last)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        start, began = samples_read, time.perf_counter()
        model.train()
        for step, micro_batches in enumerate(steps, start=1):
            watchdog.reset()
            epochs_done = epoch + samples_read / num_samples
            set_learning_rates(optimizer, base_groups, task.lr_factor(epochs_done))
            seed = args.seed, epoch, samples_read
            sums += train_step(model, optimizer, micro_batches, seed, clip_grad_norm, **options)
            samples_read = min(samples_read + args.global_batch_size, num_samples)
            if sys.stdout.isatty():
                rate = (samples_read - start) / (time.perf_counter() - began)
                progress = f"epoch {epoch} | {samples_read}/{num_samples} samples"
                print_on_rank_0(f"{progress} | {rate:.1f} samples/s", end="  \r")
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                job_sums = finite_job_sums(module, sums, earlier_sums)  # DDP meet: all-reduce
                save_job(identity, task, base_groups, (epoch, samples_read, job_sums), args)
        job_sums = finite_job_sums(module, sums, earlier_sums)  # DDP meet: all-reduce
        rate = (samples_read - start) / (time.perf_counter() - began)
        val_loss_and_metric = evaluate(module, watchdog.watch(val_loader), device, **options)
        print_epoch(epoch, job_sums, val_loss_and_metric, task.metric, rate)
        samples_read, earlier_sums = 0, torch.zeros(3, dtype=torch.float64)
        save_job(identity, task, base_groups, (epoch + 1, samples_read, earlier_sums), args)
    print_on_rank_0(f"parameters sha256 {digest(module)}")


def wrap(module, x, y, options, args):
    """Return the model that train_step() trains: the module in DistributedDataParallel.

    x, y: two samples, the same on all ranks.
    """
    if args.parallel == "dp":
        return nn.DataParallel(module)
    if not args.local_bn:
        sync_batch_norm(module)
    # Gradients lie where DDP reduces them: no copy.
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)  # DDP meet: broadcast
    settle_buckets(model, x, y, **options)  # DDP meet: all-reduce
    return model


def read_steps(
    loader,
    samples_read,
    num_samples,
    global_batch_size,
    micro_batch_size,
    stand_in,
    drop_last=False,
):
    """Yield this rank's share of each step that is left of an epoch, as a list of micro-batches.

    loader: its batches are this rank's shares of the steps, after the samples_read first samples of
        num_samples. Its sampler has been told the same samples_read and drop_last.
    micro_batch_size: the most samples that are computed at once.
    stand_in: (x[:1], y[:0]) of any batch, on the device. Of a short last step some ranks have fewer
        micro-batches than others, or none. As all must run equally many, they get this instead.
    With each step the job has read global_batch_size samples more, with the last one num_samples.
    Raises ValueError if a batch has not the size of this rank's share.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = iter(loader)
    for start in range(samples_read, num_samples, global_batch_size):
        step_size = min(global_batch_size, num_samples - start)
        if drop_last and step_size < global_batch_size:
            return
        batch = next(batches, stand_in)  # A rank may have no sample of the last step.
        x, y = (tensor.to(stand_in[0].device, non_blocking=True) for tensor in batch)
        share = share_size(step_size, rank, world_size)  # DDP differ
        if len(y) != share:
            raise ValueError(f"the loader gave {len(y)} samples of a share of {share}")
        micro_batches = list(zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True))
        most = math.ceil(share_size(step_size, 0, world_size) / micro_batch_size)  # rank 0 has most
        yield micro_batches + [stand_in] * (most - len(micro_batches))


def set_learning_rates(optimizer, base_groups, factor):
    """Set the learning rates to the task's own, multiplied by a factor."""
    for group, base_group in zip(optimizer.param_groups, base_groups, strict=True):
        group["lr"] = base_group["lr"] * factor


def print_epoch(epoch, job_sums, val_loss_and_metric, metric, rate):
    """Print the line of an epoch; raise InputError if there was nothing to train on."""
    labels = job_sums[2]
    if not labels:
        raise InputError("nothing to train on: the epoch has no label")
    loss, accuracy = job_sums[:2] / labels
    val_loss, val_accuracy = val_loss_and_metric
    print_on_rank_0(
        f"epoch {epoch} | loss {loss:.4f} {metric} {accuracy:.3f} | "
        f"val_loss {val_loss:.4f} val_{metric} {val_accuracy:.3f} | {rate:.1f} samples/s"
    )


def print_on_rank_0(text, **keywords):
    """Print for the whole job, with print's keywords."""
    if dist.get_rank() == 0:  # DDP differ
        print(text, flush=True, **keywords)


# ---- The processes
class InputError(ValueError):
    """The user's mistake: the job prints one line, and exits with status 2."""


@record  # puts the traceback of a failure into torchrun's report
def run_rank(rank, local_rank, args, make_task, store=None):
    """One process of the job, the local_rank-th of its machine: device, process group, train().

    store: where the processes find each other; without one, torchrun's environment says where.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Without it Ctrl-C would print a traceback.
    end_with_parent()
    watchdog = Watchdog(rank, args.timeout)
    if args.world_size == args.nproc_per_node:  # One machine: be reachable from no other.
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # The local rank counts on this machine, the rank on all.
        # With gloo several processes may share a GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # DDP differ
        torch.cuda.set_device(device)
    dist.init_process_group(  # DDP meet
        args.backend,
        store=store,
        rank=rank,
        world_size=args.world_size,
        device_id=device if args.backend == "nccl" else None,
        timeout=datetime.timedelta(seconds=args.timeout + 60),  # The watchdog comes first.
    )
    print_on_rank_0(
        f"{args.parallel} on {args.backend}, world size {args.world_size}, {device.type}, "
        f"global batch size {args.global_batch_size}, torch {torch.__version__}"
    )
    try:
        train(args, device, make_task, watchdog)
    except InputError as error:
        # Rank 0, if it refuses the same, prints the line and ends the others while they sleep.
        if rank != 0:  # DDP differ
            time.sleep(5)
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except Exception:
        # If this rank fails only because it has lost another, it is ended while it sleeps, and does
        # not report that.
        time.sleep(1)
        raise
    # Not in a `finally`: a rank that has failed would wait here for ranks that wait for it
    # (pytorch/torchtitan#1342).
    dist.destroy_process_group()  # DDP meet


def spawned(rank, args, make_task, store_path):
    """Run run_rank() in a process that launch() has started."""
    try:
        run_rank(rank, rank, args, make_task, dist.FileStore(store_path, args.world_size))
    except Exception:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


def launch(args, make_task):
    """Start the job's processes on this machine; return the exit status if it is not 0."""
    threads = max(1, torch.get_num_threads() // args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", f"{threads}")  # Each process would take all cores.
    # What fails has reported it, and is not to be reported twice.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        # Ranks meet through a file: a port could be another job's (pytorch/pytorch#126510).
        spawn_args = args, make_task, f"{folder}/store"
        try:
            processes = mp.spawn(spawned, spawn_args, args.nproc_per_node, join=False)
            while not processes.join(grace_period=0):  # When one fails, the others are ended.
                pass
        except mp.ProcessExitedException as error:
            if error.signal_name:
                print(f"rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
            return max(error.exit_code, 1)
        except KeyboardInterrupt:
            for process in mp.active_children():
                process.kill()
            return 130


# ------------------------------------------------------------------------------------------------
# The above is data-parallel training. What follows lets a job survive, read other data, and be
# started by hand.


# ---- A job that hangs, and ranks that are not the same job
class Watchdog:
    """Ends a rank, and with it the job, when no step has begun for `timeout` seconds.

    First it prints which rank this is and where its main thread is. It counts the seconds in which
    it was awake: the time in which a whole job is suspended does not count.
    """

    def __init__(self, rank, timeout):
        self.steps_begun = 0
        threading.Thread(target=self.wait, args=(rank, timeout), daemon=True).start()

    def reset(self):
        """Say that a step begins."""
        self.steps_begun += 1

    def watch(self, batches):
        """Yield the batches, each of which counts as a step."""
        for batch in batches:
            self.reset()
            yield batch

    def wait(self, rank, timeout):
        """Sleep until a step has taken too long; then print where, and exit."""
        steps_begun, seconds = 0, 0
        while seconds < timeout:
            time.sleep(1)
            seconds = seconds + 1 if self.steps_begun == steps_begun else 0
            steps_begun = self.steps_begun
        frame = sys._current_frames()[threading.main_thread().ident]
        stack = "".join(traceback.format_stack(frame, limit=16))
        sys.stderr.write(f"rank {rank} has been here for {seconds} s (--timeout):\n{stack}")
        time.sleep(3)  # Ranks that wait for this one have time to print, too.
        os._exit(1)


def end_with_parent(worker_id=None):
    """Have this process end with the one that has started it, however that ends.

    worker_id: DataLoader passes the number of a loader worker.
    """

    def wait(parent):
        parent.join()
        os._exit(1)

    if mp.parent_process():  # Under torchrun there is none, but torchrun ends its processes.
        threading.Thread(target=wait, args=(mp.parent_process(),), daemon=True).start()


def refuse_unequal_ranks(identity, task, args):
    """Raise InputError on all ranks if one of them has other options, data, net or optimizer."""
    options = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    del options["--nproc-per-node"]  # Machines may have unequally many GPUs.
    num_val_samples = {"the number of validation samples": count_samples(task.val_set)}
    identities = [None] * args.world_size
    dist.all_gather_object(identities, identity | options | num_val_samples)
    for rank, identity_there in enumerate(identities):
        refuse_other_job(f"rank {rank}", identity_there, identities[0])


# ---- Saving and resuming
def save_checkpoint(path, state):
    """Write a checkpoint. At every moment `path` is the old one or the new one, complete.

    state is made of tensors and plain Python values. What load_checkpoint() could not read is
    refused here, with torch.load's error. To go on in the middle of an epoch, on any number of
    ranks, it holds the module's and the optimizer's state, the epoch, how many of its samples the
    job has read, and its sums over all ranks. Rank 0 alone writes; all_reduce_sums() comes before,
    on all ranks. A process that is killed in between leaves a file beside, PATH with 32 digits.
    """
    path = os.path.realpath(path)  # A link stays a link.
    temporary = f"{path}.{uuid.uuid4().hex}"  # No other writer has this name.
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # Otherwise a crash might leave the name and no data.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def load_checkpoint(path, file=None):
    """Return what save_checkpoint() has written, with its tensors on the CPU.

    Every rank loads it into the module before that goes into DDP.
    file: a file object with the content of path, if it has been read already.
    Raises InputError if it is damaged, FileNotFoundError. Nothing that it contains is executed.
    """
    try:
        # To the CPU: otherwise every rank's copy lands on GPU 0 (pytorch/examples#969).
        return torch.load(file or path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # Which one depends on where the damage is.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{path} is damaged or not a checkpoint ({reason})") from error


def count_samples(dataset):
    """The number of samples of an epoch over all ranks; None for a stream to evaluate on."""
    if isinstance(dataset, IterableDataset):
        return getattr(dataset, "samples_per_epoch", None)
    return len(dataset)


def identify(task, args):
    """What must be equal on all ranks, and in a checkpoint and the job that resumes from it."""
    identity = {
        "the dataset": type(task.train_set).__name__,
        "the number of samples": count_samples(task.train_set),
        "--length": args.length,
        "--seed": args.seed,
        "the optimizer": type(task.optimizer).__name__,
    }
    for name, tensor in task.module.state_dict().items():
        identity[f"the shape of {name}"] = list(tensor.shape)
    names = {parameter: name for name, parameter in task.module.named_parameters()}
    for i, group in enumerate(task.optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            identity[f"parameter {j} of the optimizer's group {i}"] = names.get(parameter)
    return identity


def refuse_other_job(whose, there, here):
    """Raise InputError if two identities differ, and say in what."""
    for name in there | here:
        if there.get(name) != here.get(name):
            values = f"{name} is {there.get(name)} there, but {here.get(name)} here"
            raise InputError(f"{whose} is of another job: {values}")


def save_job(identity, task, base_groups, progress, args):
    """Write what resume() goes on from, if the command line asks for it; all ranks may call it.

    base_groups: the optimizer's param groups as the task has made them. What the optimizer itself
    has changed since, such as a counter of steps, is saved. The learning rate and the rest, such as
    the weight decay, are those that the command line of the resumed job gives.
    """
    if args.checkpoint is None or dist.get_rank() != 0:  # DDP differ: one rank writes
        return
    optimizer = task.optimizer.state_dict()
    changed = []
    for group, base_group in zip(optimizer["param_groups"], base_groups, strict=True):
        names = [name for name in group if name != "lr" and group[name] != base_group.get(name)]
        changed.append({name: group[name] for name in names})
    state = {
        "identity": identity,
        "global_batch_size": args.global_batch_size,
        "progress": progress,
        "module": task.module.state_dict(),
        "optimizer": optimizer["state"],
        "changed": changed,
    }
    save_checkpoint(args.checkpoint, state)


def read_checkpoint(path):
    """Return the bytes of a checkpoint or None; raise InputError if none can be written there."""
    if path is None:
        return None
    real_path = os.path.realpath(path)
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(real_path)):
            pass  # It can be written.
        if os.path.exists(real_path):
            with open(real_path, "rb") as file:
                return file.read()
    except OSError as error:
        raise InputError(f"--checkpoint {path}: {error.strerror}") from error
    print(f"there is no checkpoint {path} yet", flush=True)


def resume(identity, task, args):
    """Go on from the checkpoint, or from the beginning if there is none.

    Returns the job's progress (epoch, samples_read, sums): how many samples of which epoch it has
    read, and what they came to over all ranks, float64 (3,) on the CPU.
    Raises InputError if the file is damaged or of another job, and says in what it differs.
    """
    content = from_rank_0(read_checkpoint, args.checkpoint)
    if content is None:
        return 0, 0, torch.zeros(3, dtype=torch.float64)
    state = load_checkpoint(args.checkpoint, io.BytesIO(content))
    if not isinstance(state, dict) or "identity" not in state:
        raise InputError(f"{args.checkpoint} holds something else than a job")
    refuse_other_job(args.checkpoint, state["identity"], identity)
    task.module.load_state_dict(state["module"])
    groups = task.optimizer.state_dict()["param_groups"]
    for group, changed in zip(groups, state["changed"], strict=True):
        group.update(changed)
    task.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
    epoch, samples_read, _ = state["progress"]
    print_on_rank_0(f"resuming from {args.checkpoint}: epoch {epoch}, {samples_read} samples read")
    if state["global_batch_size"] != args.global_batch_size:
        print_on_rank_0(f"until now the global batch size was {state['global_batch_size']}")
    return state["progress"]


def settle_buckets(model, x, y, batch_sums=batch_sums, count_labels=count_labels, amp=False):
    """Have DDP decide before the first step how it groups the gradients for its all-reduces.

    In its first backward DDP sees in which order gradients come, and then groups them anew. The
    groups, its buckets, decide in which order the ranks are added up. Without this, the first step
    after resuming would have the first groups, where the uninterrupted job had the second ones. On
    three or more ranks that changes the last bit.

    x, y: any samples, the same on all ranks; two, for BatchNorm may refuse one. The module is left
    as it was, in training mode.
    """
    model.train()
    buffers = [buffer.clone() for buffer in model.buffers()]
    loss_sum, _ = run_micro_batch(model, x, y, batch_sums, count_labels, amp)
    loss_sum.backward()
    model.zero_grad(set_to_none=False)
    with torch.no_grad():
        for buffer, saved in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(saved)


def finite_job_sums(module, sums, earlier_sums):
    """Return the sums of all ranks and of the time before a stop, float64 (3,) on the CPU.

    Raises FloatingPointError, on all ranks alike, if they or a parameter are not finite.
    """
    job_sums = earlier_sums + all_reduce_sums(sums)
    for tensor in [job_sums, *module.parameters()]:
        if not tensor.isfinite().all():
            raise FloatingPointError("the loss or a parameter is not finite; it is not saved")
    return job_sums


def digest(module):
    """SHA-256 over all parameters and buffers: equal digests, equal modules."""
    sha256 = hashlib.sha256()
    for tensor in module.state_dict().values():
        sha256.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


def from_rank_0(function, *args):
    """Call function(*args) on rank 0; every rank returns its result, or raises its InputError.

    So the others need not see the files. The result is pickled; with NCCL it goes through the GPU.
    """
    result = [None]
    if dist.get_rank() == 0:  # DDP differ
        try:
            result = [function(*args)]
        except InputError as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], InputError):
        raise result[0]
    return result[0]


# ---- Loaders, and the random numbers of an item
class SeededItems(Dataset):
    """The items of a map-style dataset, whose random numbers depend on (seed, epoch, index) alone.

    So an augmentation that draws from PyTorch's, NumPy's or Python's generator is the same on any
    number of ranks and loader workers, and after resuming.
    """

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # Loader workers see it.

    def set_epoch(self, epoch):
        """Say which epoch comes."""
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        seed_generators(self.seed, self.epoch.item(), index)
        return self.dataset[index]


def make_loader(task, device, args, training):
    """Return this rank's loader of the task's training or validation data."""
    dataset = task.train_set if training else task.val_set
    sampler = None
    may_keep_workers = isinstance(dataset, ShardStream)
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(
            dataset,
            shuffle=training,
            seed=args.seed,
            drop_last=training and args.drop_last,
            global_batch_size=args.global_batch_size,
        )
        dataset = SeededItems(dataset, args.seed)
        may_keep_workers = True
    # In training a batch is this rank's share of a step; read_steps() cuts it into micro-batches.
    share = share_size(args.global_batch_size, dist.get_rank(), args.world_size)  # DDP differ
    workers = {}
    if args.num_workers > 0:
        # Tensors go to the workers by file name, as a process may not keep many files open.
        mp.set_sharing_strategy("file_system")
        workers = {
            # Not fork, says DDP's documentation: threads of CUDA and NCCL may hold locks.
            "multiprocessing_context": "spawn",
            # A kept worker does not learn of another stream's set_epoch().
            "persistent_workers": may_keep_workers,
            "worker_init_fn": end_with_parent,
        }
    return DataLoader(
        dataset,
        share if training else args.micro_batch_size,
        sampler=sampler,
        collate_fn=task.collate_fn,
        pin_memory=device.type == "cuda",
        num_workers=args.num_workers,
        **workers,
    )


def start_epoch(loader, epoch, start):
    """Tell a loader which epoch comes, and that the job has read its `start` first samples."""
    if isinstance(loader.dataset, IterableDataset):
        loader.dataset.set_epoch(epoch, start)
    else:
        loader.dataset.set_epoch(epoch)
        loader.sampler.set_epoch(epoch, start)


def first_sample_twice(task):
    """Return a batch of the first sample of the validation data, twice."""
    for sample in task.val_set:
        return task.collate_fn([sample, sample])
    raise InputError("the validation data has no sample")


# ---- Tar shards, for data too large to index
DECODERS = {
    "npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
    "cls": int,
    "json": json.loads,
    "txt": bytes.decode,
}


def read_shard(path):
    """Yield the samples of a tar file in webdataset's format, in order, as dictionaries.

    A file `a/017.x.npy` is member "x.npy" of the sample whose "__key__" is "a/017". DECODERS says
    by the end of its name what becomes of it; otherwise it stays bytes. Nothing is unpacked to disk
    or unpickled. Raises ValueError, naming file and member, where the file is damaged.
    """
    sample, member = {}, None
    with open(path, "rb") as file:
        try:
            tar = tarfile.TarFile(fileobj=file)
            while member := tar.next():
                tar.members.clear()  # or it would keep them all
                name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                if not name or not member.isreg() or member.issparse():
                    continue
                key, extension = name[1], name[2].lower()
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                file.seek(member.offset_data)  # tarfile's own reader costs as much again
                decode = DECODERS.get(extension.rpartition(".")[2], bytes)
                sample |= {"__key__": key, extension: decode(file.read(member.size))}
            file.seek(tar.offset)  # tarfile takes a damaged header for the end; the end is zeros
            if file.read(512) != bytes(512) or not sample:
                raise ValueError("damaged, cut off or without a sample")
        except Exception as error:  # damaged headers raise many kinds
            place = member.name if member else "at its end"
            raise ValueError(f"shard {path}, {place}: {error}") from error
    yield sample


def draw_shards(shards, generator):
    """Yield shards without end, each drawn at random from all of them."""
    while True:
        yield generator.choice(shards)


def read_pairs(shards):
    """Yield (x, y) tensors, from the members x.npy and y.npy of each sample in the shards."""
    for path in shards:
        for sample in read_shard(path):
            if "x.npy" not in sample or "y.npy" not in sample:
                raise ValueError(f"shard {path}, {sample['__key__']}: x.npy or y.npy is missing")
            yield torch.from_numpy(sample["x.npy"]), torch.from_numpy(sample["y.npy"])


def shuffle_endless(samples, buffer_size, generator):
    """Yield endless samples in random order; until its buffer is full, read two and yield one."""
    buffer = []
    for sample in samples:
        buffer.append(sample)
        if len(buffer) < buffer_size:
            buffer.append(next(samples))
        yield buffer.pop(generator.integers(len(buffer)))


class ShardStream(IterableDataset):
    """(x, y) tensors from tar shards, given as paths or glob patterns, for one of many ranks.

    With samples_per_epoch, counted over all ranks, it is for training. Every loader worker of every
    rank draws shards with replacement, without end, mixes their samples in a buffer, and cuts this
    stream into epochs: the next one goes on where the last one stopped. So no rank runs out before
    the others (webdataset/webdataset#225), and no part of a shard is out of reach. A rank has its
    share of each step of global_batch_size samples; its loader workers take whole steps in turns.
    What is drawn depends on (seed, rank, worker) and on the epoch and start with which it begins.

    Without samples_per_epoch, for evaluation, the shards are split over ranks and loader workers,
    and each sample is read once.
    Raises InputError for a pattern without a shard, and ValueError as read_shard does.
    """

    def __init__(
        self,
        shards,
        samples_per_epoch=None,
        global_batch_size=None,
        *,
        seed=0,
        shuffle_buffer=1000,
        num_replicas=None,
        rank=None,
    ):
        self.shards = []
        for pattern in shards:
            self.shards += sorted(glob.glob(pattern))
            if not glob.glob(pattern):
                raise InputError(f"there is no shard {pattern}")
        self.samples_per_epoch = samples_per_epoch
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.global_batch_size = global_batch_size or self.num_replicas
        self.set_epoch(0)
        self._samples = None  # the endless stream, once it has begun in this process

    def set_epoch(self, epoch, start=0):
        """Say which epoch comes, and that the job has already read `start` samples of it."""
        self.epoch = epoch
        self.start = start

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self.samples_per_epoch is None:
            of_rank = self.shards[self.rank :: self.num_replicas]  # DDP differ
            return read_pairs(of_rank[worker::num_workers])
        if self._samples is None:
            numbers = self.seed, self.epoch, self.start, self.rank, worker  # DDP differ
            generator = np.random.default_rng(numbers)
            pairs = read_pairs(draw_shards(self.shards, generator))
            self._samples = shuffle_endless(pairs, self.shuffle_buffer, generator)
        full_steps, rest = divmod(self.samples_per_epoch - self.start, self.global_batch_size)
        self.start = 0  # set_epoch does not reach a worker that is kept for the next epoch.
        share = share_size(self.global_batch_size, self.rank, self.num_replicas)
        num_samples = len(range(worker, full_steps, num_workers)) * share
        if worker == full_steps % num_workers:  # The last step is its turn.
            num_samples += share_size(rest, self.rank, self.num_replicas)
        return itertools.islice(self._samples, num_samples)


# ---- The command line
def at_least(low, kind=int):
    """An argparse type: a finite number of this kind, from low on."""

    def number(text):
        if not low <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number from {low} on")
        return kind(text)

    return number


def make_parser():
    """The options; parser.error prints one line and exits with status 2."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    count = at_least(1)
    add("--nproc-per-node", type=count, help="processes [one per GPU, without GPUs 2]")
    add("--backend", choices=["nccl", "gloo"], help="[nccl with a GPU a process]")
    add("--parallel", choices=["ddp", "dp"], default="ddp", help="dp: nn.DataParallel, one process")
    add("--num-workers", type=at_least(0), default=0, help="of each loader [0]")
    add("--epochs", type=count, default=6, help="[6]")
    add("--global-batch-size", type=count, default=24, help="samples in a step of the job [24]")
    add("--micro-batch-size", type=count, help="samples computed at once [a process's share]")
    add("--lr", type=at_least(0, float), default=0.01, help="not scaled [0.01]")
    add("--clip-grad-norm", type=at_least(0, float), help="the largest norm of a step's gradient")
    add("--drop-last", action="store_true", help="leave out what does not fill a global batch")
    add("--amp", action="store_true", help="run net and loss under bfloat16 autocast")
    add("--local-bn", action="store_true", help="BatchNorm over each process's own samples")
    add("--seed", type=at_least(0), default=0, help="of all that is random [0]")
    add("--num-samples", type=count, default=100, help="in the synthetic dataset [100]")
    add("--length", type=count, default=10000, help="positions in a sample [10000]")
    add("--shards", nargs="+", default=[], help="train on tar shards: paths or patterns")
    add("--val-shards", nargs="+", default=[], help="and evaluate on these")
    add("--samples-per-epoch", type=count, help="drawn from the shards, over all processes")
    add("--checkpoint", help="resume from this file if it exists; write it after each epoch")
    add("--checkpoint-every", type=count, help="and after every so many steps of an epoch")
    add("--timeout", type=count, default=600, help="seconds until a job that hangs ends [600]")
    return parser


def decide_processes(args, refuse):
    """Decide which processes the job has, and on which backend; refuse what cannot work."""
    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        refuse("there are GPUs, but CUDA does not start; CUDA_VISIBLE_DEVICES= trains without them")
    torchrun = dist.is_torchelastic_launched()
    if torchrun:
        if args.nproc_per_node:
            refuse("--nproc-per-node is torchrun's own: give it before the file's name")
        args.nproc_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
        if restarts and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
            # Restarted ranks would look each other up in the store of the dead ones
            # (pytorch/pytorch#135712, #167288).
            refuse(
                "a restart would hang: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun "
                "--standalone or --rdzv-backend=c10d"
            )
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        refuse("WORLD_SIZE is another launcher's: start the processes with torchrun")
    default = 1 if args.parallel == "dp" else gpus or 2
    args.nproc_per_node = args.nproc_per_node or default
    args.world_size = int(os.environ["WORLD_SIZE"]) if torchrun else args.nproc_per_node
    if args.parallel == "dp" and (args.world_size > 1 or args.amp):
        refuse("--parallel dp is one process, without --amp")
    gpu_each = args.nproc_per_node <= gpus
    args.backend = args.backend or ("nccl" if gpu_each else "gloo")
    # A launcher may show each process only the GPU that is its own: then --backend nccl says so.
    if args.backend == "nccl" and not gpu_each and not (torchrun and gpus):
        refuse(f"NCCL needs a GPU a process, {args.nproc_per_node} and not {gpus}: --backend gloo")


def decide_batches(args, refuse):
    """Decide the size of micro-batches; refuse options that do not fit together."""
    size = args.global_batch_size
    if args.world_size > size:
        refuse(f"{args.world_size} processes are more than the {size} of --global-batch-size")
    args.micro_batch_size = args.micro_batch_size or math.ceil(size / args.world_size)
    of_shards = [args.shards, args.val_shards, args.samples_per_epoch]
    if any(of_shards) and not all(of_shards):
        refuse("--shards, --val-shards and --samples-per-epoch go together")
    if args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint-every needs --checkpoint")


def main(argv, make_task=make_task, parser=None):
    """The program; returns the exit status if it is not 0.

    make_task: a function (args, device) at the top level of your script, which returns your Task.
    parser: make_parser() with options of yours, which make_task finds in args.
    """
    if argv == ["cases"]:
        return show_cases()
    parser = parser or make_parser()
    args = parser.parse_args(argv)
    if torch.__version__ < (2, 9):
        parser.error(f"PyTorch {torch.__version__} is too old: 2.9 or newer is needed")
    decide_processes(args, parser.error)
    decide_batches(args, parser.error)
    if not dist.is_torchelastic_launched():
        return launch(args, make_task)
    run_rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), args, make_task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
