"""Data-parallel training with PyTorch in one file: to run, to copy from and to read.

    bash run.sh                # train: one process per GPU (NCCL), or two on the CPU (gloo)
    bash run.sh cases          # which samples each rank reads
    bash run.sh --help         # the options
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

One process for each GPU runs this file. Its number is its rank; their number is the world size.
They meet in collectives, calls that wait until every rank makes them: an all-reduce gives all ranks
the sum of their tensors, a broadcast gives them rank 0's. A comment that begins with DDP marks each
line in which ranks meet, and each in which they must differ. Copy these with care.
"""

import argparse
import contextlib
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import re
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import uuid
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # for its effect: see the end of worker()
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)


# ---- Your task: data, net, optimizer and loss. To train what is yours, change this part.
class SyntheticDataset(Dataset):
    """`num_samples` random signals with a label at every position.

    Item i is (x, y): x float32 (3, length), standard normal; y int64 (length,), the channel of x
    with the largest sum over the position and its two neighbours. It depends on (seed, i) alone, so
    it does not matter which process reads it, or when. Raises IndexError outside [0, num_samples).
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
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, num_classes, L)."""

    def __init__(self, num_classes=3):
        super().__init__(
            nn.Conv1d(3, 16, 3, padding=1),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Conv1d(32, num_classes, 3, padding=1),
            nn.BatchNorm1d(num_classes),  # no ReLU: cross entropy takes logits of either sign
        )


def make_task(args):
    """Return (train_set, val_set, module, optimizer): change it to train what is yours.

    Every process calls it after torch.manual_seed(args.seed), so all begin with the same module,
    which is still on the CPU. The first dimension of the module's output must be the sample.

    A dataset is map-style, of pairs (x, y) that the sampler below deals out; or an IterableDataset
    that splits itself by rank and loader worker, as ShardStream does. To train on, the latter needs
    samples_per_epoch, counted over all ranks, and set_epoch(epoch, start).
    """
    if args.shards:
        train_set = ShardStream(args.shards, args.samples_per_epoch, seed=args.seed)
        val_set = ShardStream(args.val_shards)
    else:
        train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
        val_set = SyntheticDataset(25, args.length, args.seed + 1)
    module = ConvNet()
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    return train_set, val_set, module, optimizer


def count_labels(y):
    """The number of labels in a batch, as an integer tensor without dimensions on y's device."""
    return (y != -100).sum()  # cross_entropy ignores labels of -100


def batch_sums(logits, y):
    """Return (loss_sum, correct): the sum of a batch's losses and the number of correct labels.

    logits (N, C, ...), y int64 (N, ...). Both results are tensors without dimensions on the device,
    the first with its graph. They are sums because means cannot be added up over ranks.
    """
    if y.is_floating_point():  # cross_entropy would take them for probabilities
        raise InputError("labels must be integers; a regression sets batch_sums and count_labels")
    loss_sum = F.cross_entropy(logits, y, reduction="sum")
    predicted = logits.detach().max(dim=1).indices  # argmax takes ten times as long on a CPU
    return loss_sum, (predicted == y).sum()


# ---- Which samples a rank reads
class DistributedSampler(Sampler):
    """The indices that one of `num_replicas` ranks reads in an epoch.

    The epoch's order is a permutation of the dataset that depends on (seed, epoch) alone, so all
    ranks know it. Of W ranks, rank r reads positions r, r + W, r + 2W, ... of it. After k samples
    on each rank exactly the first k * W positions have been read: one number, `start`, says how far
    the job has come, and any number of ranks can go on from there.

    It has the arguments, attributes and indices of torch.utils.data.DistributedSampler, and beyond
    them `start`, to go on in mid-epoch, and `pad`, for evaluation. It needs 4 bytes a sample, where
    torch holds a list of Python integers (pytorch/pytorch#45427). It is no subclass: a library that
    asks for torch's class by isinstance() does not recognise it.

    drop_last: leave out the last samples of the order if there is not one for every rank.
    pad: otherwise repeat samples from the start of the order until all ranks have equally many, as
        training needs, where every step is a collective. With pad=False and drop_last=False each
        sample is read exactly once and some ranks read one less: that is for evaluation.
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
        pad=True,
    ):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas}, counted from 0")
        self.set_epoch(0)

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order, without its first `start` samples: the job has read them."""
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"start is {start}, but must be in [0, {len(self.dataset)}]")
        self.epoch = epoch
        self.start = start
        self.total_size = len(self.dataset) - start
        if self.drop_last:
            self.total_size -= self.total_size % self.num_replicas
        elif self.pad:
            self.total_size += -self.total_size % self.num_replicas
        self.num_samples = len(self._positions())
        self._passes = 0

    def _positions(self):
        """This rank's positions; those from len(dataset) on are padding, and wrap around."""
        return range(self.start + self.rank, self.start + self.total_size, self.num_replicas)

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        n = len(self.dataset)
        positions = self._positions()
        if not self.shuffle:
            for position in positions:
                yield position % n
            return
        self._passes += 1
        if self._passes == 2:  # torch stays silent and trains on one order: pytorch/pytorch#31771
            warnings.warn(
                f"second pass over the order of epoch {self.epoch}: call set_epoch(epoch) "
                "before each epoch, or every epoch has the same order",
                stacklevel=2,
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        dtype = torch.int32 if n < 2**31 else torch.int64
        order = torch.randperm(n, generator=generator, dtype=dtype)
        mine = order[positions.start : positions.stop : positions.step].clone()  # no view of it
        padding = [int(order[position % n]) for position in positions[len(mine) :]]
        del order  # From here on only this rank's part of it is in memory.
        for chunk in mine.split(8192):  # A list of all indices would take 36 bytes for each.
            yield from chunk.tolist()
        yield from padding


# ---- A step, evaluation, checkpoints
def forward(model, x, y, amp):
    """Run model and loss on a micro-batch, and return (loss_sum, sums).

    loss_sum has its graph. sums has none: it is float64 (3,) on the device, the sum of the losses,
    the correct labels and the labels, to be added up over micro-batches, steps and ranks.
    y may be shorter than x: the samples of x beyond it do not count.
    """
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = model(x)  # DDP: a wrapped model broadcasts rank 0's buffers, once a step
        loss_sum, correct = batch_sums(logits[: len(y)], y)
    sums = torch.stack([loss_sum.double(), correct, count_labels(y)])
    return loss_sum, sums.detach()


def train_step(model, optimizer, x, y, micro_batch_size, amp=False):
    """Make one optimizer step of the job, from this rank's share (x, y) of the global batch.

    Its gradient is that of the mean loss over all labels of the global batch, however they are
    spread over ranks and micro-batches. A mean of the means over each micro-batch would be another
    gradient wherever these have unequally many labels (huggingface/transformers#34242).
    y may be shorter than x: the samples of x beyond it do not count.
    Returns the sums of forward() over this rank's share. Nothing waits for a GPU, as .item() would.
    """
    labels = count_labels(y)
    pending = dist.all_reduce(labels, async_op=True)  # DDP: all-reduce, while forward() runs
    sums = 0
    for begin in range(0, len(x), micro_batch_size):
        end = begin + micro_batch_size
        # Before the last micro-batch gradients are added up here, without an all-reduce.
        is_last = end >= len(x) or not isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss_sum, micro_batch_sums = forward(model, x[begin:end], y[begin:end], amp)
            if begin == 0:
                pending.wait()  # Now these are the labels of all ranks. (A GPU's stream waits.)
            # In backward DDP divides the sum of the gradients by the world size: hence the factor,
            # so that the divisor is the labels of all ranks. Without any label the gradient is 0.
            loss = loss_sum * dist.get_world_size() / labels.clamp(min=1)
            loss.backward()  # DDP: all-reduce of the gradients, with the last micro-batch
        sums += micro_batch_sums
    # Clip gradients here, and set the learning rate of a schedule.
    optimizer.step()
    optimizer.zero_grad()
    return sums


def all_reduce_sums(sums):
    """Return the sums of all ranks, added up, on the CPU; this waits for the device."""
    sums = sums.clone()
    dist.all_reduce(sums)  # DDP: all-reduce
    return sums.cpu()


@torch.no_grad()
def evaluate(module, loader, device, amp=False):
    """Return [loss, accuracy] over the batches of all ranks; some ranks may have more than others.

    module: the bare one. The wrapper's forward is a collective, which a rank without a batch would
    miss. It is left in eval mode. Without any label both results are nan.
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)  # DDP: broadcast; all use rank 0's statistics of BatchNorm
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in loader:
        x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        sums += forward(module, x, y, amp)[1]
    job_sums = all_reduce_sums(sums)  # DDP: all-reduce
    return (job_sums[:2] / job_sums[2]).tolist()


def digest(module):
    """SHA-256 over all parameters and buffers: equal digests, equal modules."""
    sha256 = hashlib.sha256()
    for tensor in module.state_dict().values():
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


def save_checkpoint(path, state):
    """Write a checkpoint. At every moment `path` is the old one or the new one, complete.

    A process that is killed in between leaves a file beside it, PATH with 32 digits.
    """
    path = os.path.realpath(path)  # A link stays a link.
    temporary = f"{path}.{uuid.uuid4().hex}"  # No other writer has this name.
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # Otherwise a crash might leave the name and no data.
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


class InputError(ValueError):
    """Input that cannot work: one line, status 2. In a job all ranks must raise it together."""


def load_checkpoint(path, job):
    """Return the checkpoint at path, its tensors on the CPU, or None if there is none.

    job: a dictionary of what must be the same to go on from it. Raises InputError if the file is
    damaged or of another job, and says in what it differs.
    """
    if not path or not os.path.exists(path):
        return None
    try:
        # To the CPU: otherwise every rank's copy lands on GPU 0 (pytorch/examples#969).
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["job"]
    except Exception as error:  # which one depends on where the damage is
        raise InputError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__})"
        ) from error
    for name in job | saved:
        there, here = saved.get(name), job.get(name)
        if there != here:
            raise InputError(f"{path} is of another job: {name} was {there}, but is {here} here")
    return state


# ---- The training loop
def on_rank_0(function, *args):
    """Call function(*args) on rank 0; every rank returns its result, or raises its InputError.

    So the others need not see the files. The result is pickled; with NCCL it goes through the GPU.
    """
    result = [None]
    if dist.get_rank() == 0:
        try:
            result = [function(*args)]
        except InputError as error:
            result = [error]
    dist.broadcast_object_list(result)  # DDP: broadcast
    if isinstance(result[0], InputError):
        raise result[0]
    return result[0]


def print_on_rank_0(text, **options):
    """Print for the whole job, with print's options."""
    if dist.get_rank() == 0:
        print(text, flush=True, **options)


def leave_if_orphaned(worker_id=None):
    """End this process if the one that started it has ended before anything could notice it.

    worker_id: DataLoader passes the number of a loader worker.
    """
    parent = mp.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def make_loader(dataset, batch_size, device, args, training):
    """Return (this rank's loader of a dataset, the object whose set_epoch says what it reads)."""
    is_stream = isinstance(dataset, IterableDataset)
    drop_last = training and args.drop_last
    sampler = None
    if not is_stream:
        sampler = DistributedSampler(  # DDP: each rank reads its own part
            dataset, shuffle=training, seed=args.seed, drop_last=drop_last, pad=training
        )
    workers = {}
    if args.num_workers > 0:
        # Not fork, says DDP's documentation: threads of CUDA and NCCL may hold locks. The dataset's
        # tensors go to the workers by file name: a process may open only so many files.
        mp.set_sharing_strategy("file_system")
        # set_epoch does not reach a stream in a worker that is kept for the next epoch.
        kept = not is_stream or isinstance(dataset, ShardStream)
        workers = {
            "multiprocessing_context": "spawn",
            "persistent_workers": training and kept,
            "worker_init_fn": leave_if_orphaned,
        }
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        pin_memory=device.type == "cuda",
        num_workers=args.num_workers,
        generator=torch.Generator().manual_seed(args.seed + dist.get_rank()),  # DDP: for workers
        **workers,
    )
    return loader, dataset if is_stream else sampler


def first_sample_twice(dataset):
    """Return a batch of the dataset's first sample, twice: BatchNorm may refuse a single one."""
    for sample in dataset:
        return default_collate([sample, sample])
    raise InputError("the validation data has no sample")


def settle_buckets(model, val_set, device, amp):
    """Have DDP group the gradients for its all-reduces for good, before the first step.

    DDP sums groups of gradients, its buckets. After its first backward it groups them anew, in the
    order in which they came, and the grouping decides in which order the ranks are added up. So a
    resumed job on three or more ranks would differ from the uninterrupted one in the last bit.
    All take rank 0's sample of the validation data, of which another rank may have none.
    """
    x, y = on_rank_0(first_sample_twice, val_set)  # DDP: broadcast
    model.train()
    buffers = [buffer.clone() for buffer in model.buffers()]
    loss_sum, _ = forward(model, x.to(device), y.to(device), amp)
    loss_sum.backward()  # DDP: all-reduce
    model.zero_grad()
    with torch.no_grad():
        for buffer, saved in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(saved)


def count_samples(dataset):
    """The number of samples of an epoch, over all ranks."""
    if isinstance(dataset, IterableDataset):
        return dataset.samples_per_epoch
    return len(dataset)


def describe_job(train_set, module, optimizer, args):
    """What a checkpoint and the job that goes on from it must have in common, as a dictionary."""
    return {
        "the dataset": type(train_set).__name__,
        "the number of samples": count_samples(train_set),
        "--length": args.length,
        "--seed": args.seed,
        "the optimizer": [
            type(optimizer).__name__,
            *[len(group["params"]) for group in optimizer.param_groups],
        ],
        **{name: list(tensor.shape) for name, tensor in module.state_dict().items()},
    }


def seed_step(seed, epoch, samples_read, rank):
    """Seed PyTorch for the step after `samples_read` samples of the epoch.

    So dropout and augmentation differ between ranks and steps, and are the same after resuming. It
    does not reach NumPy's generator or loader workers: draw from (seed, index) there, as
    SyntheticDataset does.
    """
    torch.manual_seed(hash((seed, epoch, samples_read, rank)))  # Only hashes of strings vary.


def check_finite(module, sums):
    """Raise FloatingPointError, on all ranks alike, if the loss or a parameter is not finite."""
    for tensor in [sums, *module.parameters()]:
        if not tensor.isfinite().all():
            raise FloatingPointError("the loss or a parameter is not finite; it is not saved")


def resume(state, module, optimizer, args):
    """Go on from a checkpoint, or from the beginning if it is None.

    Returns the job's progress (epoch, samples_read, sums): how many samples of which epoch it has
    read, and what they came to over all ranks, float64 (3,) on the CPU.
    """
    if state is None:
        return 0, 0, torch.zeros(3, dtype=torch.float64)
    module.load_state_dict(state["module"])
    # The learning rate and the other hyperparameters are this job's, not the checkpoint's.
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state["optimizer"]})
    epoch, samples_read, _ = state["progress"]
    print_on_rank_0(f"resuming from {args.checkpoint}: epoch {epoch}, {samples_read} samples read")
    if state["global_batch_size"] != args.global_batch_size:
        print_on_rank_0(f"until now the global batch size was {state['global_batch_size']}")
    return state["progress"]


def save_job(job, module, optimizer, progress, args):
    """Write what resume() goes on from, if the command line asks for it; all ranks may call it."""
    if not args.checkpoint or dist.get_rank() != 0:  # DDP: one rank writes
        return
    state = {
        "job": job,
        "global_batch_size": args.global_batch_size,
        "progress": progress,
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
    }
    save_checkpoint(args.checkpoint, state)


def train(args, device):
    """One rank's part of the job: train, evaluate, print and save, epoch by epoch."""
    rank, world_size = dist.get_rank(), args.world_size
    torch.manual_seed(args.seed)  # All ranks begin with the same net.
    train_set, val_set, module, optimizer = make_task(args)
    module.to(device)
    optimizer.load_state_dict(optimizer.state_dict())  # Adagrad has a state, which must follow.
    if args.sync_bn:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    job = describe_job(train_set, module, optimizer, args)
    state = on_rank_0(load_checkpoint, args.checkpoint, job)  # DDP: broadcast
    first_epoch, samples_read, sums_before = resume(state, module, optimizer, args)
    del state  # It is as large as the module and the optimizer.
    if args.parallel == "dp":
        model = nn.DataParallel(module)
    else:
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)  # DDP: broadcast
    settle_buckets(model, val_set, device, args.amp)  # DDP: all-reduce
    num_samples, share = count_samples(train_set), args.global_batch_size // world_size
    loader, source = make_loader(train_set, share, device, args, training=True)
    val_loader, _ = make_loader(val_set, args.micro_batch_size, device, args, training=False)
    for epoch in range(first_epoch, args.epochs):
        source.set_epoch(epoch, samples_read)  # DDP: a new order, the same on every rank
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        start, begin = samples_read, time.perf_counter()
        batches = iter(loader)
        model.train()
        for step in itertools.count(1):
            seed_step(args.seed, epoch, samples_read, rank)  # DDP: random numbers of its own
            batch = next(batches, None)
            if batch is None:
                break
            x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
            last_position = samples_read + (len(x) - 1) * world_size + rank
            if last_position >= num_samples:  # At most one sample a rank is too many, its last.
                y = y[:-1]  # It stays in x, as all ranks must make the step, but does not count.
            sums += train_step(model, optimizer, x, y, args.micro_batch_size, args.amp)  # DDP
            samples_read = min(samples_read + len(x) * world_size, num_samples)
            if sys.stdout.isatty():
                rate = (samples_read - start) / (time.perf_counter() - begin)
                progress = f"epoch {epoch} | {samples_read}/{num_samples} samples"
                print_on_rank_0(f"{progress} | {rate:.1f} samples/s", end="  \r")
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                job_sums = sums_before + all_reduce_sums(sums)  # DDP: all-reduce
                check_finite(module, job_sums)
                save_job(job, module, optimizer, (epoch, samples_read, job_sums), args)
        job_sums = sums_before + all_reduce_sums(sums)  # DDP: all-reduce. The device is done.
        rate = (samples_read - start) / (time.perf_counter() - begin)
        check_finite(module, job_sums)
        loss_sum, correct, labels = job_sums.tolist()
        if not labels:
            raise InputError("nothing to train on: the epoch has no label")
        val_loss, val_accuracy = evaluate(module, val_loader, device, args.amp)  # DDP: all-reduce
        print_on_rank_0(
            f"epoch {epoch} | loss {loss_sum / labels:.4f} accuracy {correct / labels:.3f} | "
            f"val_loss {val_loss:.4f} val_accuracy {val_accuracy:.3f} | {rate:.1f} samples/s"
        )
        samples_read, sums_before = 0, torch.zeros_like(sums_before)
        save_job(job, module, optimizer, (epoch + 1, samples_read, sums_before), args)
    print_on_rank_0(f"parameters sha256 {digest(module)}")


# ---- One process of the job, and the launch
@record  # puts the traceback of a failure into torchrun's report
def worker(rank, local_rank, args, store=None):
    """One process of the job, the local_rank-th of its machine: device, process group, train().

    store: where the processes find each other; without one, torchrun's environment says where.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback.
    leave_if_orphaned()
    if (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        # The store, in which ranks look each other up, is that of the dead ones
        # (pytorch/pytorch#135712, #167288).
        sys.exit("this restart would hang: run torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    if args.world_size == args.nproc_per_node:  # On one machine, be reachable from this one only.
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # The local rank counts on this machine, the rank on all.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(  # DDP: join
        args.backend,
        store=store,
        rank=rank,
        world_size=args.world_size,
        device_id=device if args.backend == "nccl" else None,
    )
    print_on_rank_0(
        f"{args.parallel} on {args.backend}, world size {args.world_size}, {device.type}, "
        f"global batch size {args.global_batch_size}, torch {torch.__version__}"
    )
    status = 0
    try:
        train(args, device)
    except InputError as error:
        status = 2
        print_on_rank_0(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
        dist.barrier()  # DDP: launchers end all ranks when one leaves; the line is out by now
    # After any other error this is not reached: destroying the group could wait for ranks that wait
    # for this one (pytorch/torchtitan#1342). A group that something holds on to aborts the exit
    # (pytorch/pytorch#190489). train()'s model is gone by now; default arguments of
    # torch.distributed.nn would hold it if that were first imported while there is a group.
    dist.destroy_process_group()  # DDP: leave
    sys.exit(status)


def spawned(rank, args, store_path):
    """worker() in a process of mp.spawn, with the traceback of the rank that failed first.

    mp.spawn shows the traceback of one rank, perhaps one that failed only because another was gone.
    """
    try:
        worker(rank, rank, args, dist.FileStore(store_path, args.world_size))
    except Exception:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # An ordinary exit leaves the others time to fail, too.


def launch(args):
    """Start the job's processes on this machine; return the exit status if it is not 0."""
    threads = max(1, torch.get_num_threads() // args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", f"{threads}")  # Each process would take all cores.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # not of SIGTERM
    with tempfile.TemporaryDirectory() as folder:
        # Ranks meet through a file: a port could be another job's (pytorch/pytorch#126510).
        try:
            mp.spawn(spawned, (args, f"{folder}/store"), args.nproc_per_node)
        except mp.ProcessExitedException as error:
            if error.signal_name:
                print(f"rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
            return max(error.exit_code, 1)
        except KeyboardInterrupt:
            for process in mp.active_children():
                process.kill()
            return 130


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
    stream into epochs: the next one goes on where the last one stopped. So all ranks have equally
    many samples (webdataset/webdataset#225), and no part of a shard is out of reach. What is drawn
    depends on (seed, rank, worker) and on the epoch and start with which the stream begins.

    Without it, for evaluation, the shards are split over ranks and loader workers, and each sample
    is read once. Raises FileNotFoundError for a missing shard, and ValueError as read_shard does.
    """

    def __init__(
        self,
        shards,
        samples_per_epoch=None,
        *,
        seed=0,
        shuffle_buffer=1000,
        num_replicas=None,
        rank=None,
    ):
        self.shards = []
        for pattern in shards:
            self.shards += sorted(glob.glob(pattern)) or [pattern]
        self.samples_per_epoch = samples_per_epoch
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.set_epoch(0)
        self._samples = None  # the endless stream, once it has begun in this process

    def set_epoch(self, epoch, start=0):
        """Say which epoch comes, and that the job has already read `start` samples of it."""
        self.epoch = epoch
        self.start = start

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self.samples_per_epoch is None:
            return read_pairs(self.shards[self.rank :: self.num_replicas][worker::num_workers])
        if self._samples is None:
            generator = np.random.default_rng(
                (self.seed, self.epoch, self.start, self.rank, worker)
            )
            pairs = read_pairs(draw_shards(self.shards, generator))
            self._samples = shuffle_endless(pairs, self.shuffle_buffer, generator)
        # Equally many for all ranks: those of rank 0.
        left = len(range(self.start, self.samples_per_epoch, self.num_replicas))
        self.start = 0  # set_epoch does not reach a worker that is kept for the next epoch.
        return itertools.islice(self._samples, len(range(worker, left, num_workers)))


# ---- The sampler at work
CASES = [  # title, samples, with a sampler, set_epoch called, drop_last
    ("1: no sampler: every rank reads everything", 8, False, False, True),
    ("2: with the sampler: ranks split the data, the same way every epoch", 8, True, False, True),
    ("3: set_epoch: a new split each epoch", 8, True, True, True),
    ("4: 3 samples a rank: short batches are kept", 6, True, False, False),
    (
        "4, dropping the short batch: a batch of 4 never fills, nothing is read",
        6,
        True,
        False,
        True,
    ),
    ("5: 5 samples on 2 ranks: one is repeated to make 6", 5, True, False, False),
    ("5, with set_epoch: it is the first of that epoch's order", 5, True, True, False),
    ("6: last batches of one sample, which BatchNorm may refuse", 10, True, False, False),
    ("7: drop_last: that batch is gone", 10, True, False, True),
]


def show_case(title, num_samples, with_sampler, set_epoch, drop_last):
    """Print the batches of 4 samples that each of two ranks reads in two epochs."""
    print(f"\ncase {title}\n{num_samples} samples, 2 ranks, batches of 4")
    for epoch in range(2):
        for rank in range(2):
            sampler = range(num_samples)
            if with_sampler:
                sampler = DistributedSampler(sampler, 2, rank, drop_last=drop_last)
                sampler.set_epoch(epoch if set_epoch else 0)
            batches = BatchSampler(sampler, 4, drop_last)
            print(f"  epoch {epoch}  rank {rank} ", *batches)


# ---- The command line
def number(kind, low):
    """An argparse type: a number from low on, within reason."""

    def parse(text):
        if not low <= kind(text) <= 2**40:
            raise ValueError
        return kind(text)

    parse.__name__ = (
        f"{kind.__name__} from {low} to 2**40"  # invalid int from 1 to 2**40 value: '0'
    )
    return parse


def make_parser():
    """The options; parser.error prints one line and exits with status 2."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    count = number(int, 1)
    add("command", nargs="?", choices=["train", "cases"], default="train", help="[train]")
    add("--nproc-per-node", type=count, help="processes [one per GPU, without GPUs 2]")
    add("--backend", choices=["nccl", "gloo"], help="[nccl if each process has its own GPU]")
    add("--parallel", choices=["ddp", "dp"], default="ddp", help="dp: nn.DataParallel, one process")
    add("--num-workers", type=number(int, 0), default=0, help="of each loader [0]")
    add("--epochs", type=count, default=6, help="[6]")
    add("--global-batch-size", type=count, help="samples in a step of the job [4 a process]")
    add("--micro-batch-size", type=count, help="samples computed at once [a process's share]")
    add("--lr", type=number(float, 0), default=0.01, help="not scaled [0.01]")
    add("--drop-last", action="store_true", help="leave out what does not fill a global batch")
    add("--amp", action="store_true", help="run net and loss under bfloat16 autocast")
    add("--sync-bn", action="store_true", help="BatchNorm over all processes (GPUs only)")
    add("--seed", type=number(int, 0), default=0, help="of all that is random [0]")
    add("--num-samples", type=count, default=100, help="in the synthetic dataset [100]")
    add("--length", type=count, default=10000, help="positions in a sample [10000]")
    add("--shards", nargs="+", default=[], help="train on tar shards: paths or patterns")
    add("--val-shards", nargs="+", default=[], help="and evaluate on these")
    add("--samples-per-epoch", type=count, help="drawn from the shards, over all processes")
    add("--checkpoint", help="resume from this file if it exists; write it after each epoch")
    add("--checkpoint-every", type=count, help="and after every so many steps of an epoch")
    return parser


def check_processes(args, refuse):
    """Decide which processes the job has, and on which backend; refuse what cannot work."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    torchrun = dist.is_torchelastic_launched()
    if torchrun:
        if args.nproc_per_node:
            refuse("--nproc-per-node is torchrun's own: give it before the file's name")
        args.nproc_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    default = 1 if args.parallel == "dp" else gpus or 2
    args.nproc_per_node = args.nproc_per_node or default
    args.world_size = int(os.environ["WORLD_SIZE"]) if torchrun else args.nproc_per_node
    if args.parallel == "dp" and (args.world_size > 1 or args.sync_bn or args.amp):
        refuse("--parallel dp is one process, without --sync-bn and --amp")
    gpu_each = args.nproc_per_node <= gpus
    if torchrun and gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        gpu_each = True  # The launcher shows each process only the GPU that is its own.
    args.backend = args.backend or ("nccl" if gpu_each else "gloo")
    if args.backend == "nccl" and not gpu_each:
        refuse(f"NCCL needs a GPU a process, {args.nproc_per_node} and not {gpus}: --backend gloo")
    if args.sync_bn and not gpus:
        refuse("--sync-bn needs GPUs: SyncBatchNorm runs on nothing else")


def check_batches(args, refuse):
    """Decide the sizes of batches; refuse what cannot be divided."""
    args.global_batch_size = args.global_batch_size or 4 * args.world_size
    args.micro_batch_size = args.micro_batch_size or args.global_batch_size // args.world_size
    if args.global_batch_size % args.world_size:
        refuse(
            f"--global-batch-size {args.global_batch_size} is no multiple of {args.world_size}, "
            "the number of processes"
        )


def check_files(args, refuse):
    """Refuse shards that are not there and a checkpoint that could not be written."""
    of_shards = [args.shards, args.val_shards, args.samples_per_epoch]
    if any(of_shards) and not all(of_shards):
        refuse("--shards, --val-shards and --samples-per-epoch go together")
    for pattern in args.shards + args.val_shards:
        if not glob.glob(pattern):
            refuse(f"there is no shard {pattern}")
    if args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint-every needs --checkpoint")
    if args.checkpoint is not None:
        folder = os.path.dirname(os.path.realpath(args.checkpoint))
        if not args.checkpoint or not os.access(folder, os.W_OK):
            refuse(f"--checkpoint {args.checkpoint}: no file can be written there")


def main(argv):
    """The program; returns the exit status if it is not 0."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command == "cases":
        for case in CASES:
            show_case(*case)
        return
    check_processes(args, parser.error)
    check_batches(args, parser.error)
    check_files(args, parser.error)
    if not dist.is_torchelastic_launched():
        return launch(args)
    worker(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
