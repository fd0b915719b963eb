"""Data-parallel training with PyTorch in one file: run it, read it, copy it and edit your copy.

    bash run.sh         # one process per GPU, or two processes on the CPU. Options: --help
    torchrun --standalone --nproc-per-node=4 ddp_reference.py

Several processes run this file. Each process has a number from 0, its rank; the number of processes
is the world size. Every rank holds a copy of the net. In each step the ranks share one global batch
of samples: each rank computes the gradient of its own share, and DistributedDataParallel (DDP)
averages the gradients over the ranks. Then all ranks make the same optimizer step, so the copies
stay equal.

The number of ranks changes the time that a training takes, but its result only by rounding. The
exceptions are dropout, because each rank draws its own masks, and BatchNorm with --local-bn or
--micro-batch-size, because it sees less than the global batch. A job that was killed continues from
its checkpoint, on any number of ranks that divides the global batch.

Some calls need every rank: an all-reduce gives each rank the sum of all ranks' tensors, a broadcast
gives each rank the tensor of rank 0. If one rank skips such a call, the others wait until a timeout
ends the job. The comment RANKS MEET marks each such call, even where another one hides it. The
comment RANKS DIFFER marks each line in which ranks do different things.

Chapters 1 to 5 are data-parallel training. Chapters 6 to 10 are read when a line needs them.
"""

import argparse
import faulthandler
import os
import random
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# Keep this import, though nothing uses it: if PyTorch imports the module by itself, later, gloo may
# crash when the process exits (pytorch/pytorch#190489).
import torch.distributed.nn
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


# ---- 1. Your task: the data, the net, the loss, the learning rate. Change this chapter.
class SyntheticDataset(Dataset):
    """Random signals x, float32 (3, length). Labels y, int64 (length,): argmax of smoothed x."""

    def __init__(self, num_samples, length, seed):
        self.num_samples = num_samples
        self.length = length
        self.seed = seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        # An item depends on (seed, index) alone. The hash of integers is the same in each process.
        generator = torch.Generator().manual_seed(hash((self.seed, index)))
        x = torch.randn(3, self.length, generator=generator)
        return x, F.avg_pool1d(x, 3, stride=1, padding=1).max(dim=0).indices


class ConvNet(nn.Sequential):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, 3, L).

    BatchNorm subtracts the mean, so a bias of the convolution would have no effect. Its gradient
    would be rounding noise, which Adam would turn into full-size steps.
    """

    def __init__(self):
        layers = []
        for in_channels, out_channels in ((3, 16), (16, 32), (32, 3)):
            conv = nn.Conv1d(in_channels, out_channels, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm1d(out_channels), nn.ReLU()]
        super().__init__(*layers[:-1])  # After the logits there is no ReLU.


METRICS = ("loss", "accuracy")  # The names of the means that are printed.


def batch_sums(output, y):
    """Return the number of labels, then a sum for each of METRICS: float64 (1 + len(METRICS),).

    output: logits (N, C, ...). y: int64 (N, ...); cross_entropy ignores the label -100. The first
    metric must be the loss, whose gradient is computed. Sums of batches can be added up. Means
    cannot, because batches have unequally many labels.
    """
    loss = F.cross_entropy(output, y, reduction="sum")
    predicted = output.max(dim=1).indices  # argmax() returns the same, but is slower on a CPU.
    return torch.stack([(y != -100).sum(), loss.double(), (predicted == y).sum()])


def learning_rate(args, epochs_done):
    """Return the rate of the next step. epochs_done: 2.5 means halfway through the third epoch."""
    return args.lr  # With a warm-up: args.lr * min(1, epochs_done + 0.1)


def make_task(args, device):
    """Return (train_set, val_set, net, optimizer), with the net on the device.

    All ranks are seeded alike before, so they make the same net. train() sets the learning rates.
    An item is a sequence of tensors, of which the last is y. It may draw random numbers, but from
    the global generators of PyTorch, NumPy or Python, because train() seeds these for each item.
    """
    if args.shards:
        train_set, val_set = ShardDataset(args.shards), ShardDataset(args.val_shards)
    else:
        train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
        val_set = SyntheticDataset(25, args.length, args.seed + 1)
    net = ConvNet().to(device)
    return train_set, val_set, net, torch.optim.Adam(net.parameters())


# ---- 2. Which samples a rank reads
class DistributedSampler(Sampler):
    """PyTorch's DistributedSampler, which can also continue in the middle of an epoch.

    Let W be the world size, which PyTorch calls num_replicas, and B the global batch size. Every
    rank draws the same permutation from seed + epoch, so no rank has to ask another. Rank r reads
    its positions r, r + W, r + 2W, ... If each loader makes batches of B / W, then the k-th batches
    of all ranks are together the positions kB to kB + B - 1: on any number of ranks a step has the
    same samples. If W does not divide the dataset, the first samples are repeated at the end; with
    drop_last the last ones are left out.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        self.dataset = dataset
        self.num_replicas = num_replicas or dist.get_world_size()
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        round_up = 0 if drop_last else self.num_replicas - 1
        self.num_samples = (len(dataset) + round_up) // self.num_replicas
        self.total_size = self.num_samples * self.num_replicas
        self.set_epoch(0)

    def set_epoch(self, epoch, samples_read=0):
        """Choose the order. samples_read: what all ranks have read of it, a multiple of W."""
        self.epoch = epoch
        self.samples_read = samples_read
        self.was_read = False

    def __len__(self):
        return self.num_samples - self.samples_read // self.num_replicas

    def __iter__(self):
        order = range(len(self.dataset))
        if self.shuffle:
            if self.was_read:  # PyTorch's sampler says nothing: pytorch/pytorch#31771.
                warnings.warn("this order was read before: call set_epoch(epoch)")
            self.was_read = True
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            permutation = torch.randperm(len(order), generator=generator, dtype=torch.int32)
            order = memoryview(permutation.numpy())  # 4 bytes a sample. A list has 36.
        for position in range(self.samples_read + self.rank, self.total_size, self.num_replicas):
            yield order[position % len(order)]  # RANKS DIFFER in the position.


# ---- 3. A step, and evaluation
def forward(model, batch, amp):
    """Return batch_sums() of a batch, which is a sequence of tensors. The last of them is y."""
    device = next(model.parameters()).device
    *inputs, y = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        return batch_sums(model(*inputs), y)


def train_step(model, optimizer, batch, micro_batch_size, clip_grad_norm=None, amp=False):
    """Make one optimizer step from this rank's share of the global batch.

    The gradient is that of the mean loss over all labels of the global batch. To save memory, the
    share is computed in micro-batches, equally many on each rank. Returns the batch_sums() of the
    global batch, without waiting for a GPU.
    """
    micro_batches = list(zip(*(tensor.split(micro_batch_size) for tensor in batch)))
    total = 0
    for micro_batch in micro_batches:
        # DDP averages the gradients over the ranks in the last backward pass. In those before,
        # they only add up on this rank. DDP.no_sync() sets the same flag.
        model.require_backward_grad_sync = micro_batch is micro_batches[-1]
        sums = forward(model, micro_batch, amp)  # RANKS MEET in BatchNorm.
        sums[1].backward()  # RANKS MEET in BatchNorm, and in the last micro-batch for gradients.
        total += sums.detach()
    dist.all_reduce(total)  # RANKS MEET

    # DDP has left the sum of the ranks' gradients divided by the world size. Wanted is the sum
    # divided by the number of labels (huggingface/transformers#34242), or 0 if there are none.
    factor = dist.get_world_size() / total[0].clamp(min=1)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))  # one kernel for all gradients
    if clip_grad_norm:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    model.zero_grad()
    return total


@torch.no_grad()
def evaluate(net, batches, amp=False):
    """Return the means of METRICS over the batches of all ranks. net: without DDP's wrapper."""
    for buffer in net.buffers():  # With --local-bn each rank has statistics of its own.
        dist.broadcast(buffer, src=0)  # RANKS MEET
    net.eval()
    total = torch.zeros(1 + len(METRICS), dtype=torch.float64).to(next(net.parameters()).device)
    for batch in batches:  # Here ranks do not meet, because one may have a batch less.
        total += forward(net, batch, amp)
    dist.all_reduce(total)  # RANKS MEET
    return (total[1:] / total[0]).tolist()


def named(means, prefix=""):
    """Return the means with their names, as in "loss 0.5000 accuracy 0.7500"."""
    return " ".join(f"{prefix}{name} {mean:.4f}" for name, mean in zip(METRICS, means))


# ---- 4. The loop
def train(args, device):
    """Train and evaluate. Every rank runs this function."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    share = args.global_batch_size // world_size  # main() has refused what does not divide.
    micro_size = args.micro_batch_size or share
    seed_generators(args.seed)  # All ranks make the same net.
    train_set, val_set, net, optimizer = make_task(args, device)
    if not args.local_bn:
        convert_batch_norm(net)  # chapter 8

    train_set, val_set = SeededItems(train_set, args.seed), SeededItems(val_set, args.seed)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # Starting workers takes seconds, so they persist. end_with_parent() is in chapter 9.
    options = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    options |= {"worker_init_fn": end_with_parent, "pin_memory": device.type == "cuda"}
    loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    if not loader:  # It has no batch.
        raise ValueError("--global-batch-size is larger than the training set")
    # A DistributedSampler would repeat samples, and so falsify the means: pytorch/pytorch#25162.
    val_share = range(rank, len(val_set), world_size)  # RANKS DIFFER
    val_loader = DataLoader(val_set, micro_size, sampler=val_share, **options)

    identity = f"{args.seed=} {args.global_batch_size=} {len(train_set)=} {optimizer.__class__=}"
    # samples_read: of this epoch, by all ranks. sums: their batch_sums(). Both survive a kill.
    start, samples_read, sums = resume(args.checkpoint, identity, net, optimizer)  # RANKS MEET
    model = DistributedDataParallel(net)  # RANKS MEET: all get the parameters of rank 0.
    model.broadcast_buffers = False  # evaluate() does so. The argument is deprecated since 2.13.
    if samples_read:
        sums = sums.to(device)
    if rank == 0:  # RANKS DIFFER
        job = f"world size {world_size}, {device.type}, global batch size {args.global_batch_size}"
        print(f"ddp on {dist.get_backend()}, {job}, torch {torch.__version__}")
        if start or samples_read:
            print(f"resuming from {args.checkpoint}: epoch {start}, {samples_read} samples read")
        if start >= args.epochs:
            print("nothing is left to do: raise --epochs to go on")
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch, samples_read)  # Otherwise every epoch has the same order.
        train_set.set_epoch(epoch)  # for the random numbers of items (chapter 7)
        began = time.perf_counter()
        read_before = samples_read
        model.train()
        for batch in watched(loader, args.timeout):  # RANKS MEET in each step.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch + samples_read / len(train_set))
            seed_generators(args.seed, epoch, samples_read, rank)  # RANKS DIFFER in dropout.
            sums += train_step(model, optimizer, batch, micro_size, args.clip_grad_norm, args.amp)
            samples_read += args.global_batch_size
            step = samples_read // args.global_batch_size
            if rank == 0:  # RANKS DIFFER
                if args.checkpoint_every and step % args.checkpoint_every == 0:
                    progress = epoch, samples_read, sums
                    save_checkpoint(args.checkpoint, identity, net, optimizer, progress)
                if step % args.log_every == 0:
                    read = f"{samples_read}/{len(train_set)} samples"
                    print(f"epoch {epoch} | {read} | loss {sums[1] / sums[0]:.4f}")

        means = named(sums[1:] / sums[0])  # This waits for the GPU, so it precedes the clock.
        speed = (samples_read - read_before) / (time.perf_counter() - began)
        val_means = evaluate(net, watched(val_loader, args.timeout), args.amp)  # RANKS MEET
        samples_read, sums = 0, 0
        if rank == 0:  # RANKS DIFFER
            print(f"epoch {epoch} | {means} | {named(val_means, 'val_')} | {speed:.1f} samples/s")
            if args.checkpoint:
                save_checkpoint(args.checkpoint, identity, net, optimizer, (epoch + 1, 0, 0))


# ---- 5. The processes
@record  # torchrun then reports the traceback of the rank that failed.
def run_rank(local_rank, world_size, args, init_method="env://"):
    """Run one rank: choose its device, join the process group, train.

    local_rank: the number of the rank on its machine. init_method: how the ranks find each other,
    which is a file if mp.spawn() has started them, and environment variables if torchrun has.
    """
    end_with_parent()
    sys.stdout.reconfigure(line_buffering=True)  # Otherwise lines reach a file or pipe late.
    num_gpus = torch.cuda.device_count()
    device = torch.device("cpu")
    if num_gpus:
        device = torch.device("cuda", local_rank % num_gpus)  # RANKS DIFFER
        torch.cuda.set_device(device)
    if world_size == args.nproc_per_node:  # One machine, so the loopback interface is enough.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    backend = "nccl" if args.nproc_per_node <= num_gpus else "gloo"  # In gloo ranks share GPUs.
    rank = int(os.environ.get("RANK", local_rank))
    timeout = timedelta(seconds=args.timeout + 20)  # later than that of watched()
    dist.init_process_group(backend, init_method, timeout, world_size, rank)  # RANKS MEET
    train(args, device)  # The model ends with this call. With the model alive, the next may hang.
    # Not in a `finally`: a rank that failed would wait for the others (pytorch/torchtitan#1342).
    dist.destroy_process_group()  # RANKS MEET


def main():
    """Read the command line and train: as one rank if torchrun has started this process.

    Otherwise start the ranks of this machine, and wait for them. What cannot work is refused in one
    line, with status 2.
    """
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    for name, kind, default, meaning in (
        ("--nproc-per-node", int, num_gpus or 2, "processes on this machine"),
        ("--num-workers", int, 0, "processes with which each loader reads"),
        ("--epochs", int, 6, "passes over the training data"),
        ("--global-batch-size", int, 240, "samples in a step, over all ranks"),
        ("--micro-batch-size", int, None, "samples a rank computes at once; None: its share"),
        ("--lr", float, 0.01, "learning rate"),
        ("--clip-grad-norm", float, None, "largest norm of the gradient"),
        ("--seed", int, 0, "of the net, the order and the synthetic data"),
        ("--checkpoint", str, None, "a file: resume from it if it exists, and write it"),
        ("--checkpoint-every", int, None, "write it every so many steps, not only each epoch"),
        ("--log-every", int, 50, "steps between lines"),
        ("--timeout", int, 600, "seconds until a hang is ended"),
        ("--num-samples", int, 1200, "of the synthetic data"),
        ("--length", int, 1000, "of a synthetic signal"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{meaning} [{default}]")
    parser.add_argument("--amp", action="store_true", help="run under bfloat16 autocast")
    parser.add_argument("--local-bn", action="store_true", help="BatchNorm over a rank's share")
    parser.add_argument("--shards", nargs="+", help="tar files to train on")
    parser.add_argument("--val-shards", nargs="+", help="tar files to evaluate on")
    args = parser.parse_args()

    local_rank = os.environ.get("LOCAL_RANK")  # a text, if torchrun has started this process
    world_size = args.nproc_per_node
    if local_rank:
        world_size = int(os.environ["WORLD_SIZE"])
        args.nproc_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    elif "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        parser.error("each task would start a job of its own: start one a machine, with torchrun")
    if num_gpus and not torch.cuda.is_available():
        parser.error("CUDA does not start. Driver older than 580? TORCH=torch==2.10.0 bash run.sh")
    share, rest = divmod(args.global_batch_size, world_size)
    if rest or share < 1:
        low = max(share, 1) * world_size
        parser.error(f"--global-batch-size: equal shares need {low} or {low + world_size}")
    if bool(args.shards) != bool(args.val_shards):
        parser.error("--shards and --val-shards go together")
    if args.checkpoint_every and not args.checkpoint:
        parser.error("--checkpoint-every needs --checkpoint")
    if args.checkpoint is not None:
        path = os.path.abspath(args.checkpoint)  # For "" this is the working directory.
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
            parser.error("--checkpoint is a folder, or its folder is missing or read-only")

    if local_rank:
        return run_rank(int(local_rank), world_size, args)
    threads = torch.get_num_threads() // world_size or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # Otherwise each rank uses all cores.
    try:
        with tempfile.TemporaryDirectory() as folder:
            # A port could be taken by another job (pytorch/pytorch#126510), but not this file.
            mp.spawn(run_rank, (world_size, args, f"file://{folder}/store"), world_size)
    except KeyboardInterrupt:
        os._exit(130)  # sys.exit() would wait for the ranks, which end when this process does.


# ---- 6. Checkpoints
def save_checkpoint(path, identity, net, optimizer, progress):
    """Write a checkpoint, on rank 0 alone. A crash leaves the old file or the new one, never half.

    resume() compares identity and returns progress. Raises FloatingPointError if a parameter is not
    finite, and leaves the file as it was.
    """
    if not all(parameter.isfinite().all() for parameter in net.parameters()):
        raise FloatingPointError(f"a parameter is not finite, so {path} was not written")
    states = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"identity": identity, "progress": progress, **states}, file)
        file.flush()
        os.fsync(file)  # Otherwise a crash of the machine may leave an empty file.
    os.replace(f"{path}.tmp", path)


def resume(path, identity, net, optimizer):
    """Load the checkpoint if there is one. Return its progress, (epoch, samples_read, sums).

    Without a file the progress is (0, 0, 0); otherwise sums is on the CPU. identity: a text that
    must be equal when a job goes on. Nothing in the file is executed. Raises ValueError for a file
    that is damaged, of another job, or found by some ranks only.
    """
    progress = 0, 0, 0
    if path and os.path.exists(path):
        try:
            # Without map_location the copies of all ranks land on GPU 0 (pytorch/pytorch#23138).
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            if checkpoint["identity"] != identity:
                raise ValueError(f"it is of a job with {checkpoint['identity']}")
            net.load_state_dict(checkpoint["net"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            progress = checkpoint["progress"]
        except Exception as error:
            raise ValueError(f"{path} is damaged or of another job: {error!r}") from error
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, progress[:2])  # RANKS MEET, before rank 0 writes the file.
    if len(set(found)) > 1:
        raise ValueError(f"not all ranks have found {path}: all machines need the file")
    return progress


# ---- 7. Random numbers
# They depend on (seed, epoch, index) while an item is read, and in a step on (seed, epoch,
# samples_read, rank). So no checkpoint needs to hold the state of a generator.
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
        self.dataset, self.seed = dataset, seed
        self.epoch = torch.tensor(0).share_memory_()  # Loader workers see it change.

    def set_epoch(self, epoch):
        """Choose the random numbers of this epoch."""
        self.epoch.fill_(epoch)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        seed_generators(self.seed, self.epoch.item(), index)
        return self.dataset[index]


# ---- 8. BatchNorm over the job
class SumOverRanks(torch.autograd.Function):
    """An all-reduce through which gradients flow. PyTorch's own is deprecated.

    The sum enters the loss of every rank. So the gradient of one rank's x is the sum, over the
    ranks, of the gradients of the sum: the backward pass is the same all-reduce.
    """

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)  # RANKS MEET
        return x

    backward = forward  # RANKS MEET


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose mean and variance are those of the samples of all ranks.

    nn.SyncBatchNorm does this on GPUs, but refuses CPUs. For them this class is the definition.
    """

    def _check_input_dim(self, x):
        """Accept any shape. PyTorch's class leaves this check to its subclasses."""

    def forward(self, x):
        """Normalize x, float (N, C, ...)."""
        if not self.training:
            return super().forward(x)
        values = x.movedim(1, -1).to(self.running_mean.dtype)  # Under autocast x may be bfloat16.
        all_but_channels = tuple(range(x.dim() - 1))
        total = values.sum(all_but_channels)
        count = torch.full_like(total, values.numel() / len(total))
        total, count = SumOverRanks.apply(torch.stack([total, count]))  # RANKS MEET
        mean = total / count
        centred = values - mean  # A difference of sums of squares would lose digits.
        squares = centred.square().sum(all_but_channels)
        var = SumOverRanks.apply(squares) / count  # RANKS MEET

        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return torch.addcmul(self.bias, centred, scale).movedim(-1, 1).to(x.dtype)


def convert_batch_norm(net):
    """Turn the BatchNorm layers of a net into BatchNorm over all ranks, before DDP wraps the net.

    Subclasses of BatchNorm, and layers without weights, running statistics or momentum, stay as
    they are. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm() does nearly the same.
    """
    for layer in net.modules():
        is_batch_norm = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if is_batch_norm and layer.affine and layer.track_running_stats and layer.momentum:
            # A new layer would have new parameters, which the optimizer does not know.
            layer.__class__ = nn.SyncBatchNorm if layer.running_mean.is_cuda else GlobalBatchNorm
            layer.process_group = None  # nn.SyncBatchNorm reads it: None means all ranks.


# ---- 9. Hangs, and processes that are left over
def end_with_parent(worker_id=None):
    """End this process when its parent ends: a rank, or a loader worker, which has a worker_id.

    Otherwise loader workers live on after a kill, and keep the memory of their samples.
    """

    def wait():
        mp.parent_process().join()
        os._exit(1)

    if mp.parent_process():  # torchrun ends its ranks, unless it is killed.
        threading.Thread(target=wait, daemon=True).start()


def watched(batches, timeout):
    """Yield the batches. If one and its step take longer than timeout seconds, end the job.

    First each rank prints the stacks of its threads, even if it is stuck in C code. The ranks print
    one after another. Then the last one exits, which ends the others. A rank that is not in such a
    loop prints nothing; the timeout of its process group should be longer, and ends it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seconds = timeout + 5 * rank / world_size  # RANKS DIFFER
    is_last = rank == world_size - 1
    try:
        faulthandler.dump_traceback_later(seconds, exit=is_last)
        for batch in batches:
            yield batch
            faulthandler.dump_traceback_later(seconds, exit=is_last)
    finally:  # also when the loop over the batches is left early
        faulthandler.cancel_dump_traceback_later()


# ---- 10. Tar shards, for data of many small files
class ShardDataset(Dataset):
    """The samples of tar files in the format of webdataset, read by index.

    The members a/017.x.npy and a/017.y.npy are x and y of one sample. Every process reads all
    headers once; then each sample is a seek. That suits a local disk, not an object store.
    """

    def __init__(self, paths):
        self.samples = []
        for path in paths:
            try:
                with tarfile.open(path, "r:") as tar:
                    offsets = {member.name: member.offset_data for member in tar}
                    # tarfile takes a damaged header for the end. The end is two blocks of zeros.
                    tar.fileobj.seek(tar.offset)
                    if tar.fileobj.read(1024) != bytes(1024):
                        raise tarfile.ReadError("its end is missing")
                for name, offset in offsets.items():
                    if name.endswith(".x.npy"):
                        self.samples.append((path, offset, offsets[name[:-5] + "y.npy"]))
            except (tarfile.TarError, KeyError) as error:
                raise ValueError(f"{path} is damaged or lacks a member: {error}") from error

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, *offsets = self.samples[index]
        arrays = []
        with open(path, "rb") as file:
            for offset in offsets:
                file.seek(offset)
                arrays.append(torch.from_numpy(np.load(file, allow_pickle=False)))
        return arrays


if __name__ == "__main__":
    main()
