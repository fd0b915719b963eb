"""Data-parallel training with PyTorch in one file: run it, read it, copy it and edit your copy.

    bash run.sh         # train: one process per GPU, or two processes on the CPU. Options: --help
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

Several processes run this file. They are numbered; a process and its number are called a rank, and
the number of processes is the world size. Every rank has a copy of the net. A step trains on a
global batch of samples. Each rank computes the gradient of its share, in micro-batches if memory is
short, and DistributedDataParallel (DDP) averages the gradients over the ranks. Then all ranks make
the same optimizer step, so the copies stay equal.

A collective is a call that all ranks must make in the same order; otherwise the job hangs. An
all-reduce gives every rank the sum of all ranks' tensors, a broadcast the tensor of rank 0. NCCL
carries out collectives on GPUs, gloo on CPUs. The comment RANKS MEET marks a collective, also one
inside a call; the comment RANKS DIFFER marks a line in which ranks do different things.

The number of ranks changes the time, not the training. A job that was killed and is started again
continues from its checkpoint, on any number of ranks. There are three exceptions:
  - Rounding differs with the number of ranks, and training amplifies that.
  - Dropout differs, because each rank draws masks of its own.
  - BatchNorm differs where it does not see the global batch: with --micro-batch-size, --local-bn,
    --parallel dp, and in layers that convert_batch_norm() leaves alone.
"""

import argparse
import datetime
import faulthandler
import io
import math
import os
import random
import signal
import sys
import tarfile
import tempfile
import threading
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist

# Not used here. If PyTorch imports it later by itself, exits may abort: pytorch/pytorch#190489.
import torch.distributed.nn
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, Subset


# ---- Your task: the data, the net, the loss and the learning rate. Change this part.
class SyntheticDataset(Dataset):
    """Random signals with a label at every position. Item i depends on seed and i alone.

    x: float32 (3, length). y: int64 (length,), the channel whose mean over 3 positions is largest.
    """

    def __init__(self, num_samples, length, seed=0):
        self.num_samples = num_samples
        self.length = length
        self.seed = seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator = np.random.default_rng((self.seed, index))
        x = torch.from_numpy(generator.standard_normal((3, self.length), dtype=np.float32))
        means = F.avg_pool1d(x, 3, stride=1, padding=1)
        return x, means.max(dim=0).indices


class ConvNet(nn.Sequential):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, 3, L).

    The convolutions have no bias, because BatchNorm subtracts a bias again. The gradient of the
    bias would be nothing but rounding noise, which Adam scales up to full steps.
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
            nn.BatchNorm1d(3),
        )


def batch_sums(output, y):
    """Return (loss_sum, num_correct, num_labels) of a batch.

    output: logits (N, C, ...). y: int64 (N, ...); cross_entropy ignores the label -100. Sums of
    several batches can be added up. Means cannot, because batches have unequally many labels.
    """
    loss_sum = F.cross_entropy(output, y, reduction="sum")
    predicted = output.max(dim=1).indices  # argmax returns the same, but is slower on a CPU.
    return loss_sum, (predicted == y).sum(), (y != -100).sum()


def set_learning_rates(optimizer, args, epochs):
    """Set the learning rate of every param group; train() calls this before each step.

    epochs: how many epochs are done, a float. A warm-up would be args.lr * min(1, epochs + 0.1).
    """
    for group in optimizer.param_groups:
        group["lr"] = args.lr


def make_task(args, device):
    """Return (train_set, val_set, net, optimizer), with the net on the device.

    The datasets are map-style; their items are pairs (x, y) of tensors. The optimizer needs no
    learning rate: set_learning_rates() sets it. All ranks are seeded alike before this function, so
    random splits agree. File names must be sorted, so that they agree, too.
    """
    if args.shards:
        train_set, val_set = ShardDataset(args.shards), ShardDataset(args.val_shards)
    else:
        train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
        val_set = SyntheticDataset(25, args.length, args.seed + 1)
    net = ConvNet().to(device)
    optimizer = torch.optim.Adam(net.parameters())
    return train_set, val_set, net, optimizer


# ---- The loop
def train(args, device):
    """Train and evaluate. Every rank runs this loop; the sections below explain what it calls.

    samples_read: how many samples of the epoch all ranks together have trained on.
    sums: what batch_sums() gives for these samples, float64 (3,).
    """
    world_size = dist.get_world_size()
    micro_batch_size = args.micro_batch_size or math.ceil(args.global_batch_size / world_size)
    seed_generators(args.seed)  # Hence all ranks make the same net.
    train_set, val_set, net, optimizer = make_task(args, device)
    loader, val_loader = make_loaders(train_set, val_set, micro_batch_size, args)  # RANKS DIFFER
    identity = {"seed": args.seed, "samples": len(train_set), "optimizer": type(optimizer).__name__}
    epoch, samples_read, sums = resume(args.checkpoint, net, optimizer, identity)  # RANKS MEET
    model = data_parallel(net, args)  # RANKS MEET

    while epoch < args.epochs:
        loader.dataset.set_epoch(epoch)  # for the random numbers that items draw (SeededItems)
        loader.batch_sampler.set_epoch(epoch, samples_read)  # for the order of the samples
        step_sizes = loader.batch_sampler.step_sizes
        began, read_before = time.perf_counter(), samples_read
        model.train()
        batches = zip(watched(loader, args.timeout), step_sizes)  # watched() ends a hang.
        for step, ((x, y), step_size) in enumerate(batches, start=1):
            # All ranks cut their shares into equally many micro-batches. None may be empty, and the
            # smallest share has step_size // world_size samples.
            num_parts = math.ceil(step_size / (world_size * micro_batch_size))
            num_parts = min(num_parts, step_size // world_size)
            micro_batches = list(zip(x.tensor_split(num_parts), y.tensor_split(num_parts)))
            set_learning_rates(optimizer, args, epoch + samples_read / len(train_set))
            seed = (args.seed, epoch, samples_read)
            sums += train_step(  # RANKS MEET
                model, optimizer, micro_batches, seed, args.clip_grad_norm, args.amp
            )
            samples_read += step_size
            if step % args.log_every == 0:
                read = f"{samples_read}/{len(train_set)} samples"
                print_on_rank_0(f"epoch {epoch} | {read} | loss {sums[0] / sums[2]:.4f}")
            checkpoint_every = args.checkpoint_every or len(step_sizes)
            due = step % checkpoint_every == 0 or step == len(step_sizes)
            if args.checkpoint and due and dist.get_rank() == 0:  # RANKS DIFFER
                progress = (epoch, samples_read, sums.cpu())
                save_checkpoint(args.checkpoint, net, optimizer, identity, progress)

        # A job that resumes after the last step of an epoch has made no step above.
        loss, accuracy = (sums[:2] / sums[2]).tolist()  # This waits for the GPU.
        speed = (samples_read - read_before) / (time.perf_counter() - began)
        val_batches = watched(val_loader, args.timeout)
        val_loss, val_accuracy = evaluate(net, val_batches, device, args.amp)  # RANKS MEET
        print_on_rank_0(
            f"epoch {epoch} | loss {loss:.4f} accuracy {accuracy:.3f} | "
            f"val_loss {val_loss:.4f} val_accuracy {val_accuracy:.3f} | {speed:.1f} samples/s"
        )
        epoch, samples_read, sums = epoch + 1, 0, torch.zeros_like(sums)


def print_on_rank_0(text):
    """Print a line once for the whole job."""
    if dist.get_rank() == 0:  # RANKS DIFFER
        print(text, flush=True)


# ---- Which samples a rank reads
class DistributedSampler(Sampler):
    """The indices that one rank reads in an epoch: those of torch.utils.data.DistributedSampler.

    The order of an epoch is a permutation that follows from seed + epoch, so all ranks know it. Of
    W ranks, rank r reads the positions r, r + W, r + 2W, ... If W does not divide the number of
    samples, the first ones are repeated at the end; with drop_last, the last ones are left out. The
    arguments are those of torch, which calls the world size num_replicas.
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
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas} ranks")
        samples_each = len(dataset) / self.num_replicas
        self.num_samples = math.floor(samples_each) if drop_last else math.ceil(samples_each)
        self.total_size = self.num_samples * self.num_replicas
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Choose the order of this epoch."""
        self.epoch = epoch
        self.was_read = False

    def order(self):
        """Return the epoch's order, a sequence of int that has each index once."""
        if not self.shuffle:
            return range(len(self.dataset))
        if self.was_read:  # torch's sampler says nothing: pytorch/pytorch#31771.
            warnings.warn(f"epoch {self.epoch} again: call set_epoch(epoch)")
        self.was_read = True
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator, dtype=torch.int32)
        return memoryview(order.numpy())  # 4 bytes a sample. A list has 36: pytorch/pytorch#45427.

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        order = self.order()
        for position in range(self.rank, self.total_size, self.num_replicas):  # RANKS DIFFER
            yield order[position % len(order)]


class DistributedBatchSampler(Sampler):
    """The batch_sampler of the training loader: in each step of an epoch, this rank's indices.

    DistributedSampler deals out an epoch as a whole. Training reads through this class instead,
    which deals out the same order step by step: a step is the next part of the order, of which rank
    r of W reads the positions r, r + W, ... So a step has the same samples on any number of ranks,
    and none is repeated. Steps are as equal as can be: 100 samples at 32 are four steps of 25.

    step_sizes: for each step left in the epoch, its number of samples, over all ranks.
    Raises ValueError for an empty dataset, and for a step with fewer samples than ranks.
    """

    def __init__(self, sampler, global_batch_size):
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.set_epoch(0)
        if not self.step_sizes:
            raise ValueError("the training dataset has no samples")

    def set_epoch(self, epoch, samples_read=0):
        """Choose the epoch, and how many samples of its order the job has already read."""
        self.sampler.set_epoch(epoch)
        self.samples_read = samples_read
        samples_left = len(self.sampler.dataset) - samples_read
        num_steps = math.ceil(samples_left / self.global_batch_size)
        smaller, num_larger = divmod(samples_left, max(num_steps, 1))
        self.step_sizes = [smaller + 1] * num_larger + [smaller] * (num_steps - num_larger)
        world_size = self.sampler.num_replicas
        if num_steps > 0 and smaller < world_size:
            problem = f"a step of {smaller} samples is too small for {world_size} ranks"
            raise ValueError(f"{problem}: try a larger --global-batch-size or fewer processes")

    def __len__(self):
        return len(self.step_sizes)

    def __iter__(self):
        order = self.sampler.order()
        rank, world_size = self.sampler.rank, self.sampler.num_replicas
        begin = self.samples_read
        for step_size in self.step_sizes:
            yield list(order[begin + rank : begin + step_size : world_size])  # RANKS DIFFER
            begin += step_size


def make_loaders(train_set, val_set, micro_batch_size, args):
    """Return this rank's loaders for training and validation.

    Each validation sample is read once. A DistributedSampler repeats some, and so its results
    depend on the number of ranks: pytorch/pytorch#25162.
    """
    options = {
        "num_workers": args.num_workers,
        "persistent_workers": args.num_workers > 0,  # Starting workers takes seconds.
        "worker_init_fn": end_with_parent,
        "pin_memory": torch.cuda.is_available(),
    }
    if args.num_workers > 0:  # By default each tensor of a dataset takes an open file.
        mp.set_sharing_strategy("file_system")
    sampler = DistributedSampler(train_set, seed=args.seed)
    batch_sampler = DistributedBatchSampler(sampler, args.global_batch_size)
    loader = DataLoader(SeededItems(train_set, args.seed), batch_sampler=batch_sampler, **options)
    val_items = SeededItems(val_set, args.seed)
    share = range(dist.get_rank(), len(val_items), dist.get_world_size())  # RANKS DIFFER
    return loader, DataLoader(Subset(val_items, share), micro_batch_size, **options)


# ---- A step, and evaluation
def data_parallel(net, args):
    """Return the model, a wrapper of the net and its parameters: DDP, or nn.DataParallel.

    nn.DataParallel is one process with all GPUs. It copies the net to them in each forward pass.
    """
    if args.parallel == "dp":
        return nn.DataParallel(net)
    if not args.local_bn:
        convert_batch_norm(net)
    # RANKS MEET: all get the parameters of rank 0. Gradients lie in memory that DDP all-reduces.
    return DistributedDataParallel(net, gradient_as_bucket_view=True)


def train_step(model, optimizer, micro_batches, seed, clip_grad_norm=None, amp=False):
    """Make one optimizer step of the job, from this rank's share of the global batch.

    The gradient is that of the mean loss over all labels of the global batch. A mean of the ranks'
    means would weigh labels unequally: huggingface/transformers#34242.

    micro_batches: a list of pairs (x, y), equally many on all ranks. seed: a tuple of integers, the
    same on all ranks. Returns batch_sums() over all ranks, float64 (3,), without waiting for a GPU.
    """
    seed_generators(*seed, dist.get_rank())  # RANKS DIFFER: each draws dropout masks of its own.
    sums = 0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # In the last backward pass DDP averages the gradients over the ranks. In those before,
        # they only add up on this rank. This is the flag that DDP.no_sync() sets.
        model.require_backward_grad_sync = i == len(micro_batches)
        loss_sum, micro_batch_sums = run_micro_batch(model, x, y, amp)
        loss_sum.backward()  # RANKS MEET
        sums += micro_batch_sums
    dist.all_reduce(sums)  # RANKS MEET

    # DDP gives the sum over ranks divided by the world size. We want the sum divided by the number
    # of labels. If there are no labels, the gradient is 0, and the clamp keeps it 0.
    factor = dist.get_world_size() / sums[2].clamp(min=1e-12)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    model.zero_grad(set_to_none=False)  # Setting them to None would cost DDP a copy.
    return sums


def run_micro_batch(model, x, y, amp=False):
    """Run the forward pass: return the loss_sum, and batch_sums() as a tensor, float64 (3,)."""
    device = next(model.parameters()).device
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        output = model(x)  # RANKS MEET in training: in BatchNorm, and DDP broadcasts buffers.
        loss_sum, num_correct, num_labels = batch_sums(output, y)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    sums[0] += loss_sum
    sums[1] += num_correct
    sums[2] += num_labels
    return loss_sum, sums.detach()


@torch.no_grad()
def evaluate(net, loader, device, amp=False):
    """Return [loss, accuracy] over the batches of all ranks, and leave the net in eval mode.

    net: the bare net. DDP's forward pass is a collective, and a rank may have a batch less.
    """
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)  # RANKS MEET: with --local-bn ranks have other statistics.
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        sums += run_micro_batch(net, x, y, amp)[1]
    dist.all_reduce(sums)  # RANKS MEET
    return (sums[:2] / sums[2]).tolist()


# ---- Saving and resuming
def save_checkpoint(path, net, optimizer, identity, progress):
    """Write a checkpoint, on rank 0 alone. At every moment the file is the whole old or new one.

    Raises FloatingPointError if a parameter is not finite; the file stays as it was.
    """
    for name, parameter in net.named_parameters():
        if not parameter.isfinite().all():
            raise FloatingPointError(f"{name} is not finite, so {path} was not written")
    states = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"identity": identity, "progress": progress, **states}, file)
        file.flush()
        os.fsync(file.fileno())  # Otherwise a crash of the machine may leave an empty file.
    os.replace(f"{path}.tmp", path)


def resume(path, net, optimizer, identity):
    """Load the checkpoint, if there is one: return (epoch, samples_read, sums). All ranks call it.

    identity: plain values that must be equal to those in the file. Nothing in the file is executed.
    Raises ValueError for a file that is damaged, of another job, or found by some ranks only.
    """
    device = next(net.parameters()).device
    epoch, samples_read, sums = 0, 0, torch.zeros(3, dtype=torch.float64)
    if path and os.path.exists(path):
        try:
            # Without map_location the copies of all ranks land on GPU 0 (pytorch/examples#969).
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            if checkpoint["identity"] != identity:
                raise ValueError(f"{checkpoint['identity']} is not {identity}")
            net.load_state_dict(checkpoint["net"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            epoch, samples_read, sums = checkpoint["progress"]
        except Exception as error:
            raise ValueError(f"{path} is damaged or of another job: {error!r:.200}") from error
        print_on_rank_0(f"resuming from {path}: epoch {epoch}, {samples_read} samples read")

    found = torch.tensor([epoch, samples_read], device=device)
    smallest = found.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)  # RANKS MEET, before rank 0 writes the file
    if not torch.equal(found, smallest):
        raise ValueError(f"other ranks have not found this {path}: all machines need the file")
    return epoch, samples_read, sums.to(device)


# ---- The processes
@record  # torchrun then reports the traceback of the rank that failed.
def run_rank(local_rank, args, store_path=None):
    """Run one rank: choose its device, join the process group, train.

    local_rank: the number of the rank on its machine. store_path: a file by which spawned ranks
    find each other; torchrun's ranks find each other by environment variables.
    """
    end_with_parent()
    if args.world_size == args.nproc_per_node:  # No other machine needs to reach this one.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    device = torch.device("cpu")
    if torch.cuda.is_available():  # With gloo, ranks may share a GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # RANKS DIFFER
        torch.cuda.set_device(device)
    group = {"timeout": datetime.timedelta(seconds=args.timeout + 20)}  # later than watched()
    if store_path:  # A port could be taken: pytorch/pytorch#126510.
        store = dist.FileStore(store_path, args.world_size)
        group |= {"store": store, "rank": local_rank, "world_size": args.world_size}
    dist.init_process_group(args.backend, **group)  # RANKS MEET
    print_on_rank_0(
        f"{args.parallel} on {args.backend}, world size {args.world_size}, {device.type}, "
        f"global batch size {args.global_batch_size}, torch {torch.__version__}"
    )
    train(args, device)
    # Not in a `finally`: a rank that failed would wait for the others (pytorch/torchtitan#1342).
    dist.destroy_process_group()  # RANKS MEET


def launch(args):
    """Start the ranks of this machine. If one fails, end the others and print its traceback."""
    threads = max(1, torch.get_num_threads() // args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # Otherwise each rank uses all cores.
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (args, f"{folder}/store"), args.nproc_per_node)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        os._exit(130)  # The ranks end when this process does; sys.exit() would wait for them.


# ------------------------------------------------------------------------------------------------
# Above is data-parallel training. Below are random numbers, BatchNorm, hangs, shards and options.


# ---- Random numbers. They depend on (seed, epoch, index) while an item is read, and in a step on
# (seed, epoch, samples_read, rank). So no checkpoint needs to hold the state of a generator.
def seed_generators(*numbers):
    """Seed the generators of PyTorch, NumPy and Python from a tuple of integers."""
    seed = hash(numbers) % 2**32  # The hash of integers is the same in every process.
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 70 times as long.
    if torch.cuda.is_initialized():  # This is not so in a loader worker.
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class SeededItems(Dataset):
    """A dataset whose items draw the same random numbers on any number of ranks and workers."""

    def __init__(self, dataset, seed):
        self.dataset = dataset
        self.seed = seed
        self.epoch = torch.tensor(0).share_memory_()  # Loader workers see it change.

    def set_epoch(self, epoch):
        """Choose the random numbers of this epoch."""
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        seed_generators(self.seed, self.epoch.item(), index)
        return self.dataset[index]


# ---- BatchNorm over the job
class SumOverRanks(torch.autograd.Function):
    """An all-reduce through which gradients flow. PyTorch's own is deprecated.

    The sum enters the loss of every rank, so its gradient is the sum of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)  # RANKS MEET
        return x

    backward = forward  # The gradient is all-reduced in the same way.


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose mean and variance are those of the samples of all ranks.

    nn.SyncBatchNorm does this on GPUs, but refuses CPUs. For them this class is the definition.
    """

    def forward(self, x):
        """Normalize x, float (N, C, ...)."""
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        values = x.movedim(1, -1).to(self.running_mean.dtype)  # Under autocast x may be bfloat16.
        total = values.flatten(0, -2).sum(0)
        count = torch.full_like(total, values.numel() / len(total))
        total, count = SumOverRanks.apply(torch.stack([total, count]))
        mean = total / count
        centred = values - mean  # A difference of sums of squares would lose digits.
        var = SumOverRanks.apply(centred.square().flatten(0, -2).sum(0)) / count

        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = self.momentum
            if momentum is None:  # A cumulative average is wanted.
                momentum = 1 / self.num_batches_tracked
            unbiased_var = var * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(unbiased_var, momentum)
        output = centred * (var + self.eps).rsqrt()
        if self.weight is not None:
            output = output * self.weight
        if self.bias is not None:
            output = output + self.bias
        return output.movedim(-1, 1).to(x.dtype)


def convert_batch_norm(net):
    """Turn the BatchNorm layers of a net into BatchNorm over all ranks, before DDP wraps the net.

    The net is changed in place, and its parameters stay the same tensors. Subclasses of BatchNorm
    and layers without running statistics stay as they are. On GPUs
    nn.SyncBatchNorm.convert_sync_batchnorm() does nearly the same.
    """
    for layer in net.modules():
        is_batch_norm = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if is_batch_norm and layer.track_running_stats:
            layer.__class__ = nn.SyncBatchNorm if layer.running_mean.is_cuda else GlobalBatchNorm
            layer.process_group = None  # nn.SyncBatchNorm reads it: None means all ranks.


# ---- Hangs
def watched(batches, timeout):
    """Yield the batches. If one and its step take longer than timeout seconds, end this process.

    First the process prints the line where each of its threads is, even while C code holds the
    interpreter. The ranks do so one after the other. Then SIGALRM ends the process, and so the job.
    When the loop over the batches is left, the timers are switched off.
    """
    stagger = 5 * dist.get_rank() / dist.get_world_size()  # RANKS DIFFER

    def restart_timers():
        faulthandler.dump_traceback_later(timeout + stagger)
        signal.alarm(timeout + 10)

    try:
        restart_timers()
        for batch in batches:
            yield batch
            restart_timers()
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)


def end_with_parent(worker_id=None):
    """Have this process end with its parent. The argument is there for DataLoader, which gives one.

    Without this, loader workers live on for some ten seconds after a launcher was killed, with
    their memory. The ranks may live on, too, except on Linux, which signals a parent's end.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # On Ctrl-C, end without a traceback.

    def wait():
        mp.parent_process().join()
        os._exit(1)

    if mp.parent_process() is not None:  # Under torchrun it is None. torchrun ends its processes.
        threading.Thread(target=wait, daemon=True).start()


# ---- Tar shards, for data of many small files
def decode_npy(*contents):
    """Return a tensor for each content of a .npy file. Nothing is unpickled."""
    arrays = [np.load(io.BytesIO(content), allow_pickle=False) for content in contents]
    return tuple(torch.from_numpy(array) for array in arrays)


class ShardDataset(Dataset):
    """The samples of tar files in the format of webdataset, each read where it lies in its file.

    In such a file a/017.x.npy and a/017.y.npy are the members x.npy and y.npy of one sample.
    paths: a list of the files; the order of the samples follows it. members, decode: the bytes of
    these members become an item by decode(*contents).

    Every process reads all headers once, 0.15 ms and 48 bytes of memory a sample. Then every item
    needs a seek. That is fast on a local disk; for network disks and object stores, the streams of
    webdataset are better. Raises ValueError for a shard that is damaged or lacks a member.
    """

    def __init__(self, paths, members=("x.npy", "y.npy"), decode=decode_npy):
        self.paths = paths
        self.decode = decode
        self.places = torch.cat([read_index(i, path, members) for i, path in enumerate(paths)])

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        places = self.places[index].tolist()
        path = self.paths[places[0][0]]
        contents = []
        with open(path, "rb") as file:
            for _, offset, size in places:
                file.seek(offset)
                contents.append(file.read(size))
        try:
            return self.decode(*contents)
        except Exception as error:
            raise ValueError(f"shard {path}, sample {index}: {error!r:.200}") from error


def read_index(number, path, members):
    """Return where a shard's samples lie, int64 (samples, members, 3): (number, offset, size)."""
    samples = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for header in tar:
                folder, name = os.path.split(header.name)
                stem, dot, member = name.partition(".")
                if header.isfile() and stem and dot:
                    sample = samples.setdefault((folder, stem), {})
                    if member in sample:
                        raise ValueError(f"{header.name} comes twice")
                    sample[member] = (number, header.offset_data, header.size)
            # tarfile takes a damaged header for the end. The end is two blocks of zeros.
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(1024) != bytes(1024):
                raise ValueError("its end is missing")
        if not samples:
            raise ValueError("it has no samples")
        places = [[sample[member] for member in members] for sample in samples.values()]
        return torch.tensor(places)
    except Exception as error:
        raise ValueError(f"shard {path} is damaged or lacks a member: {error!r:.200}") from error


# ---- The command line
def at_least(low, kind=int):
    """Return an argparse type: a finite number of this kind, low or greater."""

    def number(text):
        if not low <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number from {low} on")
        return kind(text)

    return number


def make_parser():
    """Return the parser of the options. Add those of your task here."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    add = parser.add_argument
    count = at_least(1)
    add("--nproc-per-node", type=count, help="processes [one per GPU; 2 if there is no GPU]")
    add("--backend", choices=["nccl", "gloo"], help="[nccl; gloo if there is no GPU]")
    add("--parallel", choices=["ddp", "dp"], default="ddp", help="dp: nn.DataParallel, one process")
    add("--num-workers", type=at_least(0), default=0, help="workers of each loader [%(default)s]")
    add("--epochs", type=count, default=6, help="[%(default)s]")
    add("--global-batch-size", type=count, default=32, help="most samples in a step [%(default)s]")
    add("--micro-batch-size", type=count, help="samples computed at once [a rank's whole share]")
    add("--lr", type=at_least(0, float), default=0.01, help="learning rate [%(default)s]")
    add("--clip-grad-norm", type=at_least(0, float), help="the largest norm of a gradient")
    add("--amp", action="store_true", help="run the net and the loss under bfloat16 autocast")
    add("--local-bn", action="store_true", help="BatchNorm over each rank's own samples")
    add("--seed", type=at_least(0), default=0, help="[%(default)s]")
    add("--checkpoint", help="a file, for all machines the same: resume from it, and write it")
    add("--checkpoint-every", type=count, help="write it every so many steps, not only each epoch")
    add("--log-every", type=count, default=50, help="steps between lines [%(default)s]")
    add("--timeout", type=count, default=600, help="seconds until a hang is ended [%(default)s]")
    add("--num-samples", type=count, default=100, help="of the synthetic data [%(default)s]")
    add("--length", type=count, default=10000, help="of a synthetic sample [%(default)s]")
    add("--shards", nargs="+", help="train on these tar files")
    add("--val-shards", nargs="+", help="evaluate on these tar files")
    return parser


def parse_args():
    """Read the command line, and refuse what cannot work: in one line, with exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if dist.is_torchelastic_launched():  # This is a rank that torchrun has started.
        args.nproc_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        args.world_size = int(os.environ["WORLD_SIZE"])
    else:
        default = 1 if args.parallel == "dp" else num_gpus or 2
        args.nproc_per_node = args.nproc_per_node or default
        args.world_size = args.nproc_per_node
    args.backend = args.backend or ("nccl" if num_gpus else "gloo")

    folder = os.path.dirname(args.checkpoint or "") or "."
    if args.parallel == "dp" and (args.world_size != 1 or args.amp):
        parser.error("--parallel dp is one process, without --amp")
    if args.backend == "nccl" and num_gpus < args.nproc_per_node:
        parser.error(f"NCCL needs a GPU for each process, there are {num_gpus}: try --backend gloo")
    if bool(args.shards) != bool(args.val_shards):
        parser.error("--shards and --val-shards go together")
    if args.checkpoint_every and not args.checkpoint:
        parser.error("--checkpoint-every needs --checkpoint")
    if args.checkpoint and not os.access(folder, os.W_OK):
        parser.error(f"--checkpoint: the folder {folder} is missing or cannot be written")
    return args


def main():
    """Run the program: a rank if torchrun has started it, otherwise the launcher of the ranks."""
    args = parse_args()
    if dist.is_torchelastic_launched():
        run_rank(int(os.environ["LOCAL_RANK"]), args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
