"""Data-parallel training with PyTorch in one file: to run, to copy from and to read.

    bash run.sh                # train: one process per GPU (NCCL), or two on the CPU (gloo)
    bash run.sh cases          # which samples each rank reads
    bash run.sh --help         # the options
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

One process for each GPU runs this file. Each is a rank of the job, and has its own copy of the net;
the world size is how many there are. A step trains on a global batch of samples: each rank computes
its share, if need be in several micro-batches, and in the backward DistributedDataParallel (DDP)
averages the gradients. Then all ranks make the same optimizer step, so the copies stay equal.

A collective is a call that all ranks must make, in the same order, or the job hangs. An all-reduce
gives every rank the sum of their tensors, a broadcast gives every rank that of rank 0, and an
all-gather gives every rank all of them. NCCL carries them on GPUs, gloo on CPUs. The comment
"DDP meet" marks a collective, "DDP differ" a line in which ranks do different things.

The number of ranks changes the time, not the training, even if a job is killed and goes on with
another number. Exceptions are rounding (1e-7 at first, which training amplifies; more with --amp,
or with TF32, the default of convolutions on GPUs), dropout, and BatchNorm with --micro-batch-size
or --local-bn. With as many ranks and threads as before, a resumed job ends with the same bits as
one that was never stopped: seen on CPUs; GPUs would also need deterministic algorithms.
"""

import argparse
import dataclasses
import datetime
import faulthandler
import glob
import hashlib
import io
import logging
import math
import os
import random
import signal
import sys
import tarfile
import tempfile
import threading
import time
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
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate


# ---- Your task: data, net, optimizer and loss. To train your own, change this part.
@dataclasses.dataclass
class SyntheticDataset(Dataset):
    """Random signals with a label at every position; item i depends on (seed, i) alone.

    x float32 (3, length); y int64 (length,), the channel whose mean over 3 positions is largest.
    """

    num_samples: int = 100
    length: int = 10000
    seed: int = 0

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        index = range(self.num_samples)[index]  # or IndexError
        generator = np.random.default_rng((self.seed, index))
        x = torch.from_numpy(generator.standard_normal((3, self.length), dtype=np.float32))
        means = F.avg_pool1d(x, 3, stride=1, padding=1)
        return x, means.max(0).indices


class ConvNet(nn.Sequential):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, 3, L).

    The convolutions have no bias. BatchNorm would cancel it, so its gradient would be rounding
    error, which differs with the number of ranks, and Adam would make full steps of it.
    """

    def __init__(self):
        super().__init__(
            nn.Conv1d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, 3, 3, padding=1, bias=False),
            nn.BatchNorm1d(3),  # no ReLU: cross entropy takes logits of either sign
        )


def batch_sums(logits, y):
    """Return a batch's (loss_sum, num_correct, num_labels): a tensor, and two tensors or numbers.

    logits (N, C, ...), y int64 (N, ...). They are sums because means cannot be added up.
    """
    if y.is_floating_point():  # cross_entropy would take floats for probabilities.
        raise TypeError("labels must be integers; a regression has its own batch_sums")
    loss_sum = F.cross_entropy(logits, y, reduction="sum")
    predicted = logits.max(dim=1).indices  # argmax takes longer on a CPU.
    return loss_sum, (predicted == y).sum(), (y != -100).sum()  # cross_entropy ignores -100.


@dataclasses.dataclass
class Task:
    """What a job trains. The first dimension of x, y and the module's output counts samples.

    train_set, val_set: map-style datasets of pairs (x, y), which collate_fn makes tensors of.
    module: the bare net, on the device. Wrapped in DDP it is called the model.
    batch_sums: a function (output, y) as above. metric: the name of its second sum over its third.
    lr_factor: a learning rate is the optimizer's initial one times lr_factor(epochs done, a float).
        So a schedule survives any stop. It overrides torch.optim's schedulers.
    """

    train_set: Dataset
    val_set: Dataset
    module: nn.Module
    optimizer: torch.optim.Optimizer
    batch_sums: Callable = batch_sums
    lr_factor: Callable = lambda epochs: 1.0
    collate_fn: Callable = default_collate
    metric: str = "accuracy"


def add_task_options(parser):
    """Add the options that make_task() reads."""
    add = parser.add_argument
    add("--num-samples", type=at_least(1), default=100, help="of synthetic data [%(default)s]")
    add("--length", type=at_least(1), default=10000, help="of such a sample [%(default)s]")
    add("--shards", nargs="+", default=[], help="train on tar shards: paths or patterns")
    add("--val-shards", nargs="+", default=[], help="and evaluate on these")


def make_task(args, device):
    """Return the Task that the command line's args describe; main() takes such a function of yours.

    Every process calls it, equally seeded, so random splits agree. A list of files must be sorted.
    """
    if args.shards and args.val_shards:
        train_set, val_set = ShardDataset(args.shards), ShardDataset(args.val_shards)
    elif args.shards or args.val_shards:
        raise InputError("--shards and --val-shards go together")
    else:
        train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
        val_set = SyntheticDataset(25, args.length, args.seed + 1)
    module = ConvNet().to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    return Task(train_set, val_set, module, optimizer)


# ---- The loop
def train(args, device, make_task):
    """The usual training loop, which every rank runs; comments mark where ranks meet or differ.

    What it calls follows below. samples_read is how many samples of the epoch all ranks together
    have trained on, and sums, float64 (3,), what batch_sums gives for them.
    """
    seed_generators(args.seed)  # All ranks make the same net, and the same random split.
    task = make_task(args, device)
    optimizer = task.optimizer
    learning_rates = [group["lr"] for group in optimizer.param_groups]  # resume() sets others.
    set_timeout(args.timeout)  # From here on no rank waits longer for the others.
    loader, val_loader = make_loaders(task, device, args)  # DDP differ: each rank has its share
    epoch, samples_read, sums = resume(task, device, args)  # DDP meet, after all have read the file
    model = data_parallel(task, args)  # DDP meet
    options = {"batch_sums": task.batch_sums, "amp": args.amp}

    while epoch < args.epochs:
        loader.dataset.set_epoch(epoch)  # for the random numbers of the items
        loader.batch_sampler.set_epoch(epoch, samples_read)  # for their order
        step_sizes = loader.batch_sampler.step_sizes  # over all ranks
        # It is saved before the first step, so that a path that cannot be written fails at once.
        save_job(task, args, epoch, samples_read, sums)
        began, read_before = time.perf_counter(), samples_read
        model.train()
        for step, batch in enumerate(watched(loader, args.timeout)):
            factor = task.lr_factor(epoch + samples_read / len(task.train_set))
            for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
                group["lr"] = float(learning_rate * factor)
            micro_batches = split_share(batch, step_sizes[step], args.micro_batch_size)
            seed = args.seed, epoch, samples_read  # another for each step
            clip = args.clip_grad_norm
            sums += train_step(model, optimizer, micro_batches, seed, clip, **options)  # DDP meet
            samples_read += step_sizes[step]
            if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
                save_job(task, args, epoch, samples_read, sums)
            if sys.stdout.isatty():
                progress = f"epoch {epoch} | {samples_read}/{len(task.train_set)} samples"
                print_on_rank_0(progress, end="  \r")

        if not sums[2]:
            raise InputError("nothing to train on: no sample has a label")
        loss, metric = (sums[:2] / sums[2]).tolist()
        rate = (samples_read - read_before) / (time.perf_counter() - began)
        val_batches = watched(val_loader, args.timeout)
        val_loss, val_metric = evaluate(task.module, val_batches, device, **options)  # DDP meet
        print_on_rank_0(
            f"epoch {epoch} | loss {loss:.4f} {task.metric} {metric:.3f} | "
            f"val_loss {val_loss:.4f} val_{task.metric} {val_metric:.3f} | {rate:.1f} samples/s"
        )
        epoch, samples_read, sums = epoch + 1, 0, torch.zeros_like(sums)
    save_job(task, args, epoch, samples_read, sums)
    print_on_rank_0(f"parameters sha256 {digest(task.module)}")


def seed_generators(*numbers):
    """Seed PyTorch's, NumPy's and Python's generators by these integers, none negative."""
    # SeedSequence ignores zeros at the end; the count tells (1, 2) from (1, 2, 0).
    seed = int(np.random.SeedSequence((*numbers, len(numbers))).generate_state(1)[0])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed(seed) takes 70 times as long.
    if torch.cuda.is_initialized():  # not in loader workers
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)
    random.seed(seed)


# ---- Which samples a rank reads
class DistributedSampler(Sampler):
    """The indices that one rank reads in an epoch: those of torch.utils.data.DistributedSampler.

    All ranks know the epoch's order, a permutation of the dataset that depends on (seed, epoch). Of
    W ranks, rank r reads its positions r, r + W, r + 2W, ... The first samples are repeated until
    all ranks have equally many, or with drop_last the rest is left out. Arguments and attributes
    are torch's, too; num_replicas is torch's word for the world size. Unlike torch's it holds 4
    bytes a sample, not 36 (pytorch/pytorch#45427), and warns if set_epoch() was forgotten.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas}, counted from 0")
        samples_each = len(dataset) / self.num_replicas
        self.num_samples = int(samples_each) if drop_last else math.ceil(samples_each)
        self.total_size = self.num_samples * self.num_replicas
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Choose the epoch's order."""
        self.epoch = epoch
        self._passes = 0

    def order(self):
        """Return the epoch's order, int32 (n,), without repeats; warn on the second call."""
        self._passes += 1
        if self._passes == 2 and self.shuffle:  # torch stays silent: pytorch/pytorch#31771.
            warnings.warn(f"epoch {self.epoch} again: call set_epoch(epoch) before", stacklevel=3)
        n = len(self.dataset)
        if not self.shuffle:
            return torch.arange(n, dtype=torch.int32)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(n, generator=generator, dtype=torch.int32)

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        order = self.order()
        indices = order[self.rank : self.total_size : self.num_replicas]  # DDP differ
        yield from memoryview(indices.numpy())  # int after int; a list would take 36 bytes each.
        if len(indices) < self.num_samples:  # One short: repeat one from the order's beginning.
            last = self.total_size - self.num_replicas + self.rank
            yield order[last % len(order)].item()


class DistributedBatchSampler(Sampler):
    """For each step of an epoch the list of this rank's indices: a DataLoader's batch_sampler.

    A step is global_batch_size samples of the sampler's order, of which rank r of W reads those at
    r, r + W, r + 2W, ... The last two steps share what is left, so that none is tiny: 100 samples
    in steps of 24 make 24, 24, 24, 14, 14. drop_last leaves out what does not fill a step. So the
    steps are the same on any number of ranks, and one number, samples_read, says where to go on.

    step_sizes: the number of samples, over all ranks, of each step left in the epoch.
    Raises InputError if there is no step, or one with fewer samples than ranks.
    """

    def __init__(self, sampler, global_batch_size, drop_last=False):
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last
        self.set_epoch(0)
        if not self.step_sizes:
            raise InputError(f"nothing to train on: not one step of {global_batch_size} samples")

    def set_epoch(self, epoch, samples_read=0):
        """Choose the epoch's order, without its first samples, which the job has read."""
        self.sampler.set_epoch(epoch)
        self.samples_read = samples_read
        self.step_sizes = []
        samples_left = len(self.sampler.dataset) - samples_read
        if self.drop_last:
            samples_left -= samples_left % self.global_batch_size
        while samples_left > 0:
            step_size = min(samples_left, self.global_batch_size)
            if step_size < samples_left < 2 * step_size:
                step_size = math.ceil(samples_left / 2)
            if step_size < self.sampler.num_replicas:
                raise InputError(
                    f"a step of {step_size} samples is too small for {self.sampler.num_replicas} "
                    "processes: try another --global-batch-size, --drop-last or fewer processes"
                )
            self.step_sizes.append(step_size)
            samples_left -= step_size

    def __len__(self):
        return len(self.step_sizes)

    def __iter__(self):
        order = self.sampler.order()
        begin = self.samples_read
        for step_size in self.step_sizes:
            step = order[begin : begin + step_size]
            yield step[self.sampler.rank :: self.sampler.num_replicas].tolist()  # DDP differ
            begin += step_size


class SeededItems(Dataset):
    """A map-style dataset whose items' random numbers depend on (seed, epoch, index) alone.

    So augmentation is the same on any number of ranks and loader workers.
    """

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        self.epoch = torch.tensor(0).share_memory_()  # Loader workers see it change.

    def set_epoch(self, epoch):
        """Say which epoch comes."""
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        seed_generators(self.seed, self.epoch.item(), index)
        return self.dataset[index]


def make_loaders(task, device, args):
    """Return this rank's loaders: of its shares of the steps, and of every W-th validation sample.

    Each validation sample is read once; a DistributedSampler repeats some (pytorch/pytorch#25162).
    """
    options = {"collate_fn": task.collate_fn, "num_workers": args.num_workers}
    options["pin_memory"] = device.type == "cuda"
    if args.num_workers > 0:
        mp.set_sharing_strategy("file_system")  # The default keeps a file open for each tensor.
        options |= {
            # Not fork, says DDP's documentation: threads of CUDA and NCCL may hold locks.
            "multiprocessing_context": "spawn",
            "persistent_workers": True,
            "worker_init_fn": end_with_parent,
        }
    sampler = DistributedSampler(task.train_set, seed=args.seed)
    batch_sampler = DistributedBatchSampler(sampler, args.global_batch_size, args.drop_last)
    train_set = SeededItems(task.train_set, args.seed)
    loader = DataLoader(train_set, batch_sampler=batch_sampler, **options)
    val_set = SeededItems(task.val_set, args.seed)
    val_share = Subset(val_set, range(dist.get_rank(), len(val_set), dist.get_world_size()))
    return loader, DataLoader(val_share, args.micro_batch_size, **options)


# ---- A step of the job, and evaluation
def data_parallel(task, args):
    """Return the model that train_step() trains: the task's module in DistributedDataParallel.

    DDP all-reduces gradients in groups, its buckets, and regroups them after its first backward. On
    three or more ranks the buckets decide how sums are rounded. So that first backward is made and
    undone here: a resumed job then has the same buckets as one that was never stopped.
    """
    if args.parallel == "dp":
        return nn.DataParallel(task.module)
    if not args.local_bn:
        convert_batch_norm(task.module)
    model = DistributedDataParallel(task.module, gradient_as_bucket_view=True)  # DDP meet

    x, y = task.collate_fn([task.train_set[0]] * 2)  # BatchNorm may refuse a single sample.
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.train()
    loss_sum, _ = run_micro_batch(model, x, y, task.batch_sums, args.amp)
    loss_sum.backward()  # DDP meet
    model.zero_grad(set_to_none=False)
    for buffer, saved in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(saved)
    return model


def split_share(batch, step_size, micro_batch_size):
    """Return a rank's share of a step, a batch (x, y), as a list of micro-batches.

    The step is cut into nearly equal parts, and every rank takes its samples of each. 14 samples on
    2 ranks in micro-batches of 4 make two parts of 7: rank 0 takes 4 and 3, rank 1 takes 3 and 4.
    So all ranks have equally many micro-batches. A part has a sample for each rank, so that none is
    empty; therefore one may have a sample more than micro_batch_size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_parts = math.ceil(step_size / (world_size * micro_batch_size))
    num_parts = min(num_parts, step_size // world_size)
    # A cut at position p of the step has len(range(rank, p, world_size)) of this rank's before it.
    cuts = [len(range(rank, i * step_size // num_parts, world_size)) for i in range(1, num_parts)]
    xs, ys = (tensor.tensor_split(cuts) for tensor in batch)
    return list(zip(xs, ys, strict=True))


def train_step(
    model, optimizer, micro_batches, seed, clip_grad_norm=None, *, batch_sums=batch_sums, amp=False
):
    """Make one optimizer step of the job, from this rank's share of the global batch.

    The gradient is that of the mean loss over all labels of the global batch. A mean of means would
    be wrong wherever ranks or micro-batches have unequally many (huggingface/transformers#34242).

    micro_batches: a list of pairs (x, y), equally many on all ranks.
    seed: a tuple of integers, none negative; the same on all ranks, others in each step.
    Returns the sums of run_micro_batch() over all ranks. Nothing here waits for a GPU.
    """
    seed_generators(*seed, 1 + dist.get_rank())  # DDP differ: dropout's masks
    sums = 0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # DDP all-reduces with the last micro-batch; until then gradients add up on this rank.
        model.require_backward_grad_sync = i == len(micro_batches)  # DDP.no_sync() sets this, too.
        loss_sum, micro_batch_sums = run_micro_batch(model, x, y, batch_sums, amp)
        loss_sum.backward()  # DDP meet: BatchNorm in each, DDP in the last
        sums += micro_batch_sums
    dist.all_reduce(sums)  # DDP meet

    # DDP has divided the ranks' sum by the world size. It should be divided by the labels.
    factor = dist.get_world_size() / sums[2].clamp(min=1)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    seed_generators(*seed, 0)  # The same on all ranks, for an optimizer that draws random numbers.
    optimizer.step()
    model.zero_grad(set_to_none=False)  # Gradients stay in DDP's memory.
    return sums


def run_micro_batch(model, x, y, batch_sums, amp=False):
    """Run the model forward on a micro-batch, with the loss: return (loss_sum, sums).

    sums is what batch_sums returns, without a graph, as float64 (3,).
    """
    device = next(model.parameters()).device
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        output = model(x)  # DDP meet, in training: for rank 0's buffers and BatchNorm
        loss_sum, metric_sum, num_labels = batch_sums(output, y)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    sums[0] += loss_sum
    sums[1] += metric_sum
    sums[2] += num_labels
    return loss_sum, sums.detach()


@torch.no_grad()
def evaluate(module, loader, device, batch_sums=batch_sums, amp=False):
    """Return [loss, metric] over the batches of all ranks, of which some may have none.

    module: the bare net, as the model's forward is a collective. It is left in eval mode.
    """
    for buffer in module.buffers():
        received = buffer.clone()  # gloo sends a buffer that is a slice of a tensor wrongly.
        dist.broadcast(received, src=0)  # DDP meet: --local-bn gives each rank other statistics
        buffer.copy_(received)
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        sums += run_micro_batch(module, x, y, batch_sums, amp)[1]
    dist.all_reduce(sums)  # DDP meet
    return (sums[:2] / sums[2]).tolist()


# ---- The processes
@record  # puts the traceback of a failure into torchrun's report
def run_rank(local_rank, args, make_task, store_path=None):
    """One process of the job: device, process group, train().

    local_rank: its number on this machine. store_path: where ranks meet; None under torchrun.
    """
    rank = local_rank if store_path else int(os.environ["RANK"])
    store = dist.FileStore(store_path, args.world_size) if store_path else None
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Without it Ctrl-C would print a traceback.
    end_with_parent()
    if args.world_size == args.nproc_per_node:  # One machine: be reachable from no other.
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # With gloo several processes may share a GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # DDP differ
        torch.cuda.set_device(device)
    dist.init_process_group(  # DDP meet
        args.backend,
        store=store,
        rank=rank,
        world_size=args.world_size,
        device_id=device if args.backend == "nccl" else None,
        timeout=datetime.timedelta(seconds=args.timeout + 10),  # after set_timeout()'s end
    )
    print_on_rank_0(
        f"{args.parallel} on {args.backend}, world size {args.world_size}, {device.type}, "
        f"global batch size {args.global_batch_size}, torch {torch.__version__}"
    )
    try:
        train(args, device, make_task)
    except InputError as error:
        if rank != 0:  # DDP differ: if all refuse, only rank 0 prints, and the others are ended.
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
        os._exit(2)
    except Exception:
        time.sleep(1)  # A rank that failed only because another did is ended meanwhile, silently.
        raise
    # Not in a `finally`: a rank that failed would wait for the others (pytorch/torchtitan#1342).
    dist.destroy_process_group()  # DDP meet
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)


def launch(args, make_task):
    """Start the job's processes on this machine; exit with the status of what failed."""
    nprocs = args.nproc_per_node
    threads = max(1, torch.get_num_threads() // nprocs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # Otherwise each takes all cores.
    # spawn would report each rank that it ends after another has failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        store_path = f"{folder}/store"  # A port could be another job's (pytorch/pytorch#126510).
        try:
            processes = mp.spawn(run_rank, (args, make_task, store_path), nprocs, join=False)
            while not processes.join(grace_period=0):  # When one fails, the others are ended.
                pass
        except mp.ProcessRaisedException as error:
            sys.exit(str(error))  # the rank and its traceback
        except mp.ProcessExitedException as error:
            sys.exit(str(error) if error.signal_name else error.exit_code)
        except KeyboardInterrupt:
            for process in mp.active_children():
                process.kill()
            sys.exit(130)


# ------------------------------------------------------------------------------------------------
# The above is data-parallel training; below are BatchNorm, survival, shards and the command line.


# ---- BatchNorm over the job
class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm that takes the statistics in training from the micro-batches of all ranks together.

    nn.SyncBatchNorm does so on GPUs only. The ranks' statistics are put together as in Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    A channel's only value is normalised to 0; nn.BatchNorm refuses it.
    """

    def forward(self, x):
        """Normalise x, float (N, C, ...); in eval mode as nn.BatchNorm does."""
        mean, var = self.running_mean, self.running_var
        if self.training:
            with torch.no_grad():
                count, mean, var = self.job_statistics(x)
                self.num_batches_tracked += 1
                momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                unbiased_var = var * count / (count - 1).clamp(min=1)
                self.running_mean += momentum * (mean - self.running_mean)
                self.running_var += momentum * (unbiased_var - self.running_var)
            x = ThroughStatistics.apply(x, count, mean, var, self.eps)
        return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)

    def job_statistics(self, x):
        """Return the (count, mean, var) of each channel's values on all ranks, each float (C,)."""
        dims = [0, *range(2, x.dim())]
        # float32 like the buffers, even where autocast has made x bfloat16
        mean = x.mean(dims, keepdim=True, dtype=self.running_mean.dtype)
        var = (x - mean).square_().mean(dims)  # x.var() takes ten times as long on a CPU.
        count = torch.full_like(var, x[:, 0].numel())
        of_rank = torch.stack([count, mean.flatten(), var])
        of_ranks = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, of_rank)  # DDP meet
        counts, means, variances = torch.stack(of_ranks, dim=1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        var = (counts * (variances + (means - mean).square())).sum(0) / count
        return count, mean, var


class ThroughStatistics(torch.autograd.Function):
    """Return x, but have its gradient also go through the statistics.

    F.batch_norm() treats mean and variance as constants. As each x moves both, its gradient g
    becomes g - mean(g) - v * mean(g * v), where v is x normalised; the means are over all ranks.
    """

    @staticmethod
    def forward(ctx, x, count, mean, var, eps):
        ctx.save_for_backward(x, count, mean, var)
        ctx.eps = eps
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Subtract both terms, which F.batch_norm() computes at once: v * scale + shift."""
        x, count, mean, var = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        normalised = F.batch_norm(x, mean, var, eps=ctx.eps)
        products = (grad * normalised).sum(dims, dtype=mean.dtype)
        sums = torch.stack([products, grad.sum(dims, dtype=mean.dtype)])
        dist.all_reduce(sums)  # DDP meet
        scale, shift = -sums / count
        grad = grad + F.batch_norm(x, mean, var, scale, shift, eps=ctx.eps)
        return grad, None, None, None, None


def convert_batch_norm(module):
    """Turn a module's BatchNorm layers into GlobalBatchNorm, in place; their parameters stay.

    Call it before the wrapper. Layers with another forward or without running statistics stay.
    """
    batch_norm = nn.modules.batchnorm._BatchNorm
    for layer in module.modules():
        if type(layer).forward is batch_norm.forward and layer.track_running_stats:
            layer.__class__ = GlobalBatchNorm


# ---- Saving and resuming
class InputError(ValueError):
    """The user's mistake: the job prints one line, and exits with status 2."""


def save_checkpoint(path, state):
    """Write a checkpoint. At every moment path holds the complete old or the complete new one.

    state: tensors and plain Python values; what cannot be loaded again raises torch.load's error.
    Call it on rank 0 alone. A killed process may leave a temporary file, PATH plus 32 digits.
    """
    path = os.path.realpath(path)  # A link stays a link.
    temporary = f"{path}.{uuid.uuid4().hex}"  # no other writer has it
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # Otherwise a crash might leave the name and no data.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):  # It has failed.
            os.remove(temporary)


def load_checkpoint(path):
    """Return what save_checkpoint() has written, with its tensors on the CPU, on every rank.

    Nothing that it contains is executed. Raises InputError if it is damaged or not there.
    """
    try:
        # To the CPU: otherwise every rank's copy lands on GPU 0 (pytorch/examples#969).
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Which one depends on where the damage is.
        raise InputError(f"{path} is damaged or no checkpoint: {type(error).__name__}") from error


def save_job(task, args, epoch, samples_read, sums):
    """Write what resume() goes on from, if the command line asks for it; all ranks call it.

    Raises FloatingPointError, on all of them, if the loss or a parameter is not finite.
    """
    finite = [tensor.isfinite().all() for tensor in (sums, *task.module.parameters())]
    if not torch.stack(finite).all():
        raise FloatingPointError("the loss or a parameter is not finite; it is not saved")
    if args.checkpoint is None or dist.get_rank() != 0:  # DDP differ: one rank writes
        return
    state = {
        "identity": identify(task, args.seed),
        "progress": (epoch, samples_read, sums.cpu()),
        "module": task.module.state_dict(),
        "optimizer": task.optimizer.state_dict(),
    }
    try:
        save_checkpoint(args.checkpoint, state)
    except OSError as error:
        raise InputError(f"--checkpoint {args.checkpoint}: {error.strerror}") from error


def resume(task, device, args):
    """Go on from the checkpoint, if there is one: return train()'s (epoch, samples_read, sums).

    The optimizer's settings, such as its weight decay, are the checkpoint's from here on; train()
    sets only the learning rate. Raises InputError if the ranks or the checkpoint are not one job.
    """
    identity = identify(task, args.seed)
    epoch, samples_read, sums = 0, 0, torch.zeros(3, dtype=torch.float64)
    path = args.checkpoint
    if path and os.path.exists(path):
        state = load_checkpoint(path)
        try:
            refuse_difference(path, state["identity"], identity)
            task.module.load_state_dict(state["module"])
            task.optimizer.load_state_dict(state["optimizer"])
            epoch, samples_read, sums = state["progress"]
        except (LookupError, TypeError, RuntimeError) as error:  # It holds something else.
            raise InputError(f"{path} is of another job: {error!r}") from error
        print_on_rank_0(f"resuming from {path}: epoch {epoch}, {samples_read} samples read")

    own = vars(args) | identity | {"progress": (epoch, samples_read)}
    own["the number of validation samples"] = len(task.val_set)
    del own["nproc_per_node"]  # Machines may have unequally many GPUs.
    of_ranks = [None] * args.world_size
    dist.all_gather_object(of_ranks, own)  # DDP meet
    for rank, of_rank in enumerate(of_ranks):
        refuse_difference(f"rank {rank}", of_rank, of_ranks[0])
    return epoch, samples_read, sums.to(device)


def identify(task, seed):
    """What must be equal in a checkpoint, in the job that goes on from it, and on all its ranks."""
    identity = {
        "the training data": f"{type(task.train_set).__name__} of {len(task.train_set)} samples",
        "the seed": seed,
        "the optimizer": type(task.optimizer).__name__,
    }
    names = {parameter: name for name, parameter in task.module.named_parameters()}
    for i, group in enumerate(task.optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            identity[f"parameter {j} of the optimizer's group {i}"] = names.get(p), list(p.shape)
    return identity


def refuse_difference(whose, there, here):
    """Raise InputError if two dictionaries differ, and say in what."""
    for name in there | here:
        theirs, ours = there.get(name), here.get(name)
        if theirs != ours:
            raise InputError(f"{whose} is of another job: {name} is {theirs} there, {ours} here")


def digest(module):
    """SHA-256 over all parameters and buffers: equal digests, equal modules."""
    sha256 = hashlib.sha256()
    for tensor in module.state_dict().values():
        sha256.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()


def print_on_rank_0(text, end="\n"):
    """Print for the whole job."""
    if dist.get_rank() == 0:  # DDP differ
        print(text, end=end, flush=True)


# ---- Hangs and orphans
def set_timeout(seconds):
    """Have this process print its stacks and end, unless called again within so many seconds.

    The stacks appear even while C code holds the interpreter; 5 s later SIGALRM ends the process,
    and so the job. Each local rank waits 0.1 s longer: so the stacks come one after the other, and
    the line before, `Timeout (0:10:00.200000)!`, tells the local rank.
    """
    seconds += dist.get_node_local_rank(dist.get_rank()) / 10  # get_rank() without torchrun
    faulthandler.dump_traceback_later(seconds)
    signal.alarm(math.ceil(seconds) + 5)


def watched(batches, timeout):
    """Yield the batches, and set the timeout anew at each."""
    for batch in batches:
        set_timeout(timeout)
        yield batch


def end_with_parent(worker_id=None):
    """Have this process end with the one that has started it. DataLoader passes a worker_id."""

    def wait():
        mp.parent_process().join()
        os._exit(1)

    if mp.parent_process():  # Under torchrun there is none, but torchrun ends its processes.
        threading.Thread(target=wait, daemon=True).start()


# ---- Tar shards, for data of many small files
def decode_npy(*contents):
    """Return a tensor for each content of a .npy file; nothing is unpickled."""
    arrays = [np.lib.format.read_array(io.BytesIO(data), allow_pickle=False) for data in contents]
    return tuple(map(torch.from_numpy, arrays))


class ShardDataset(Dataset):
    """The samples of tar files in webdataset's format, each read where it lies.

    In such a file a/017.x.npy and a/017.y.npy are the members x.npy and y.npy of one sample.
    shards: paths or glob patterns. What a pattern finds is sorted: the same on all machines.
    members, decode: decode(*contents) makes an item from these members' bytes.

    The headers are read once, here: some 0.15 ms and 48 bytes of memory a sample.
    Raises InputError for a shard that is missing or damaged, or for a sample without a member.
    """

    def __init__(self, shards, members=("x.npy", "y.npy"), decode=decode_npy):
        self.decode = decode
        self.paths = []
        for pattern in shards:
            # A pattern without a shard is kept: read_index() cannot open it, and says so.
            self.paths += sorted(glob.glob(str(pattern))) or [pattern]
        places = [read_index(number, path, members) for number, path in enumerate(self.paths)]
        self.places = torch.cat(places)  # A tensor is small, and cheap to give to loader workers.

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        places = self.places[index].tolist()
        shard = self.paths[places[0][0]]
        contents = []
        with open(shard, "rb") as file:
            for _, begin, size in places:
                file.seek(begin)
                contents.append(file.read(size))
        try:
            return self.decode(*contents)
        except Exception as error:
            raise ValueError(f"shard {shard}, sample {index}: {error}") from error


def read_index(number, path, members):
    """Return where a shard's samples lie, int64 (samples, members, 3): (number, begin, size)."""
    samples = {}
    try:
        with tarfile.open(path, "r:") as tar:
            while header := tar.next():
                tar.members.clear()  # or it would keep them all
                folder, name = os.path.split(header.name)
                stem, dot, member = name.partition(".")
                if stem and dot and header.isreg():
                    sample = samples.setdefault((folder, stem), {})
                    sample[member] = number, header.offset_data, header.size
            # tarfile takes a damaged header for the end. The end is two blocks of zeros.
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(1024) != bytes(1024):
                raise ValueError("damaged or cut off")
        places = [[sample[member] for member in members] for sample in samples.values()]
        return torch.tensor(places, dtype=torch.int64)
    except Exception as error:  # Damaged headers raise many kinds.
        raise InputError(f"shard {path} is damaged or lacks a member: {error!r}") from error


# ---- The command line
def at_least(low, kind=int):
    """An argparse type: a finite number of this kind, from low on."""

    def number(text):
        if not low <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number from {low} on")
        return kind(text)

    return number


def make_parser():
    """The options of every job; parser.error prints one line and exits with status 2."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    add = parser.add_argument
    count = at_least(1)
    add("--nproc-per-node", type=count, help="processes [one per GPU, without GPUs 2]")
    add("--backend", choices=["nccl", "gloo"], help="[nccl, without GPUs gloo]")
    add("--parallel", choices=["ddp", "dp"], default="ddp", help="dp: nn.DataParallel, one process")
    add("--num-workers", type=at_least(0), default=0, help="of each loader [%(default)s]")
    add("--epochs", type=count, default=6, help="[%(default)s]")
    add("--global-batch-size", type=count, default=24, help="samples in a step [%(default)s]")
    add("--micro-batch-size", type=count, help="samples computed at once [a process's share]")
    add("--lr", type=at_least(0, float), default=0.01, help="not scaled [%(default)s]")
    add("--clip-grad-norm", type=at_least(0, float), help="the largest norm of a step's gradient")
    add("--drop-last", action="store_true", help="leave out what does not fill a global batch")
    add("--amp", action="store_true", help="run net and loss under bfloat16 autocast")
    add("--local-bn", action="store_true", help="BatchNorm over each process's own samples")
    add("--seed", type=at_least(0), default=0, help="of all that is random [%(default)s]")
    add("--checkpoint", help="resume from this file if it exists; write it after each epoch")
    add("--checkpoint-every", type=count, help="and after every so many steps of an epoch")
    add("--timeout", type=count, default=600, help="seconds until a hang ends [%(default)s]")
    return parser


def decide_processes(args, refuse):
    """Decide on processes, backend and micro-batches; refuse what cannot work."""
    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        refuse("there are GPUs, but CUDA does not start; CUDA_VISIBLE_DEVICES= trains without them")
    torchrun = dist.is_torchelastic_launched()
    if torchrun:
        if args.nproc_per_node:
            refuse("--nproc-per-node is torchrun's own: give it before the file's name")
        restarts = os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
        if restarts and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
            # New ranks would meet in the store of the dead ones (pytorch/pytorch#135712, #167288).
            refuse(
                "a restart would hang: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun "
                "--standalone or --rdzv-backend=c10d"
            )
        args.nproc_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        args.world_size = int(os.environ["WORLD_SIZE"])
    else:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            refuse("WORLD_SIZE is another launcher's: start the processes with torchrun")
        default = 1 if args.parallel == "dp" else gpus or 2
        args.nproc_per_node = args.nproc_per_node or default
        args.world_size = args.nproc_per_node
    if not args.micro_batch_size:
        args.micro_batch_size = math.ceil(args.global_batch_size / args.world_size)
    if args.parallel == "dp" and (args.world_size > 1 or args.amp):
        refuse("--parallel dp is one process, without --amp")
    has_own = torchrun and args.backend == "nccl"  # Each process may see only a GPU of its own.
    args.backend = args.backend or ("nccl" if gpus else "gloo")
    if args.backend == "nccl" and gpus < (1 if has_own else args.nproc_per_node):
        refuse(f"NCCL needs a GPU for each process, and there are {gpus}: try --backend gloo")


def main(argv, make_task, parser=None):
    """The program.

    make_task: a function at the top level of your script. parser: make_parser() with your options.
    """
    if argv == ["cases"]:
        return show_cases()
    parser = parser or make_parser()
    args = parser.parse_args(argv)
    if args.checkpoint_every and not args.checkpoint:
        parser.error("--checkpoint-every needs --checkpoint")
    decide_processes(args, parser.error)
    if dist.is_torchelastic_launched():
        run_rank(int(os.environ["LOCAL_RANK"]), args, make_task)
    else:
        launch(args, make_task)


def show_case(title, num_samples, with_sampler=True, with_set_epoch=True, drop_last=False):
    """Print the batches of 4 samples that each of two ranks reads in two epochs."""
    print(f"\ncase {title}\n{num_samples} samples, 2 ranks, batches of 4")
    for epoch in range(2):
        for rank in range(2):
            sampler = DistributedSampler(range(num_samples), 2, rank, drop_last=drop_last)
            if with_set_epoch:
                sampler.set_epoch(epoch)
            indices = sampler if with_sampler else range(num_samples)
            batches = torch.utils.data.BatchSampler(indices, 4, drop_last)
            print(f"  epoch {epoch}  rank {rank} ", *batches)


def show_cases():
    """Show DistributedSampler at work; torch's does the same."""
    show_case("1: no sampler: every rank reads everything", 8, with_sampler=False)
    show_case("2: no set_epoch: the same split in every epoch", 8, with_set_epoch=False)
    show_case("3: set_epoch: a new split each epoch", 8)
    show_case("4: 3 samples a rank: short batches are kept", 6)
    show_case("5: 5 samples on 2 ranks: the first is repeated to make 6", 5)
    show_case("6: last batches of one sample, which BatchNorm may refuse", 10)
    show_case("7: drop_last: that batch is gone", 10, drop_last=True)


if __name__ == "__main__":
    parser = make_parser()
    add_task_options(parser)
    main(sys.argv[1:], make_task, parser)
