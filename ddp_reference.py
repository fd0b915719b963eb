"""Data-parallel training with PyTorch in one file: a reference to run, to copy from and to read.

    bash run.sh                                  # one process per GPU (NCCL); without a GPU two on the CPU (gloo)
    python ddp_reference.py --nproc-per-node 4   # the same without run.sh, on four processes
    torchrun --standalone --nproc-per-node=4 ddp_reference.py
    torchrun --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 --master-port=29500 \\
             --nproc-per-node=8 ddp_reference.py # on the first of two machines; on the other --node-rank=1

From top to bottom: which samples a rank reads, what a sample is, the net, training and evaluation,
one process of the job, the launch, the command line. test_ddp_reference.py shows that each part does
what its docstring says; it is in the same order.
"""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import math
import os
import signal
import socket
import sys
import time
import traceback
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group exists: see worker()
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


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
        remaining = len(self.dataset) - start
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"start is {start}, but must be in [0, {len(self.dataset)}]")
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
    """Train on all that the loader gives; after each optimizer step, yield the samples read so far.

    model: wrapped in DistributedDataParallel or not; all ranks must get equally many batches.
    sums: float64 on the device; the tally of each batch is added to the first three. The fourth counts
        the steps until the sum of the losses stopped being finite.
    accumulate: batches a step. Its gradient is the mean over them, also in the last, shorter window.
    amp: run the net under bfloat16 autocast.
    """
    model.train()
    batches, samples = len(loader), 0
    for i, (x, y) in enumerate(loader):
        window = min(accumulate, batches - i // accumulate * accumulate)
        last_of_window = i % accumulate == window - 1
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        # The ranks add up their gradients during backward: once a step is enough.
        silent = isinstance(model, DistributedDataParallel) and not last_of_window
        with model.no_sync() if silent else contextlib.nullcontext():
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                logits = model(x)
                loss = F.cross_entropy(logits, y)
            (loss / window).backward()
        sums[:3] += tally(loss, logits, y)
        samples += len(x)
        if last_of_window:
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
    # The bare module: the wrapper's forward is a collective (it broadcasts the buffers), and ranks
    # with one batch less would leave the others waiting in it.
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

    Raises OSError, with the old one intact, if it cannot be written.
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
    os.fsync(directory)  # and now the name
    os.close(directory)


def load_checkpoint(path, job, module, device):
    """The state that save_checkpoint wrote, its tensors on `device`; None if there is no file.

    job: a dict of what has to be the same to go on.  module: so have its parameters' shapes.
    Raises ValueError, naming the file and what is wrong with it.
    """
    def identity(job, module_state):
        return job | {name: list(tensor.shape) for name, tensor in module_state.items()}
    try:
        # Onto this rank's device: without map_location every rank loads onto rank 0's GPU.
        state = torch.load(path, map_location=device, weights_only=True)
        saved = identity(state["job"], state["module"])
    except FileNotFoundError:
        return None
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
    if args.checkpoint and (state := load_checkpoint(args.checkpoint, args.job, module, device)):
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
        step = sums[3].clone()  # the first rank's: the others follow, by the shared gradient
        if dist.is_initialized():
            dist.all_reduce(step, dist.ReduceOp.MIN)
        raise FloatingPointError(f"the loss is not finite in epoch {epoch}, step {int(step)}: lower --lr?")
    return totals


def make_loaders(args, device, rank, world_size):
    """(sampler, loader, validation loader) of one rank."""
    train_set = SyntheticDataset(args.num_samples, args.length, args.seed)
    val_set = SyntheticDataset(25, args.length, args.seed + 1)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=args.drop_last)
    val_sampler = DistributedSampler(val_set, world_size, rank, shuffle=False, pad=False)
    # A spawned process would spawn its loader workers too, and each would import torch anew.
    fork = args.num_workers > 0 and sys.platform == "linux"
    options = dict(batch_size=args.batch_size, pin_memory=device.type == "cuda",
                   num_workers=args.num_workers, persistent_workers=args.num_workers > 0,
                   multiprocessing_context="fork" if fork else None)
    loader = DataLoader(train_set, sampler=sampler, drop_last=args.drop_last, **options)
    return sampler, loader, DataLoader(val_set, sampler=val_sampler, **options)


def train(args, device, rank, world_size):
    """What a single process would do, and what makes it one of `world_size`: train, evaluate, report.

    Returns the trained module, or None if SIGTERM ended the training early.
    """
    sampler, loader, val_loader = make_loaders(args, device, rank, world_size)
    torch.manual_seed(args.seed)
    module = ConvNet().to(device)
    if args.sync_bn:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    first_epoch, samples, saved_sums = resume(args, device, module, optimizer)
    # BatchNorm normalises each rank's batch by its own statistics (SyncBatchNorm: by those of all).
    # The running ones are rank 0's: the wrapper broadcasts them before a step, not after the last.
    model = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None,
                                    gradient_as_bucket_view=True)

    def say(line, end="\n"):
        if rank == 0:
            print(line, end=end, flush=True)

    def save(epoch, samples, sums):
        if rank == 0 and args.checkpoint:
            save_checkpoint(args.checkpoint, dict(
                job=args.job, module=module.state_dict(), optimizer=optimizer.state_dict(),
                epoch=epoch, samples=samples, sums=sums))

    say(f"{args.backend}, world size {world_size}, {device.type}, torch {torch.__version__}")
    if first_epoch >= args.epochs:
        say(f"{args.checkpoint} is of the finished job: {first_epoch} epochs")
    elif first_epoch or samples:
        say(f"resuming from {args.checkpoint}: epoch {first_epoch}, sample {samples} of {args.num_samples}")
    terminated = []
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    clear_line = "\r\033[K" if sys.stdout.isatty() else ""
    for epoch in range(first_epoch, args.epochs):
        start, read, begin, rate = samples, 0, time.perf_counter(), 0.0
        sampler.set_epoch(epoch, start)
        step = math.ceil(start / (args.batch_size * world_size * args.accumulate))
        last_step = step + math.ceil(len(loader) / args.accumulate)
        loss, correct, positions = saved_sums
        sums = torch.tensor([*(saved_sums if rank == 0 else [0, 0, 0]), step, 0], dtype=torch.float64,
                            device=device)
        for read in train_steps(model, loader, optimizer, device, sums, args.accumulate, args.amp):
            step += 1
            due = args.checkpoint_every and step % args.checkpoint_every == 0
            if step % args.log_interval and step < last_step and not due:
                continue
            sums[4] = bool(terminated)  # rides along with the sums: all ranks see it at the same step
            loss, correct, positions, _, stop = total_over_ranks(sums, epoch)
            samples = min(start + read * world_size, args.num_samples)
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
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        val_loss, val_accuracy = evaluate(model, val_loader, device)
        say(f"{clear_line}epoch {epoch} | loss {loss / positions:.4f} accuracy {correct / positions:.3f} | "
            f"val_loss {val_loss:.4f} val_accuracy {val_accuracy:.3f} | {rate:.1f} samples/s")
        samples, saved_sums = 0, [0, 0, 0]
        save(epoch + 1, samples, saved_sums)
    say(f"parameters sha256 {digest(module)}")
    return module


def worker(local_rank, args, store_address=None):
    """One process of the job: its threads, its device, its process group; then train.

    local_rank: which process of this machine it is; torchrun gives the other numbers in the environment.
    store_address: (host, port) of the TCPStore through which the ranks find each other, where the
        parent holds one; without it, they are found as torchrun says.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: end without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if store_address:
        os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(args.nproc_per_node),
                          LOCAL_WORLD_SIZE=str(args.nproc_per_node))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    store = None
    if store_address:
        store = dist.TCPStore(*store_address, is_master=False, timeout=datetime.timedelta(seconds=60))
    elif local_world_size == world_size:
        # torchrun keeps its store over a restart, and in it the addresses of ranks that are gone
        # (pytorch/pytorch#135712). Not over several machines: each counts its own restarts (#108158).
        store = dist.PrefixStore("restart " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
                                 next(dist.rendezvous("env://", rank, world_size))[0])
    if local_world_size == world_size:  # one machine: listen on nothing but the loopback address
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if "OMP_NUM_THREADS" not in os.environ:  # PyTorch would use every core in every process
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size,
                            device_id=device if args.backend == "nccl" else None)
    try:
        finished = train(args, device, rank, world_size) is not None
    except Exception as error:
        # The first rank to fail says why; the others fail because it has left.
        if store is None or store.add("failed", 1) == 1:
            print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        traceback.clear_frames(error.__traceback__)
        signal.alarm(3)  # if leaving the group waits for ranks that wait for this one, end all the same
        sys.exit(1)
    finally:
        # Nothing may hold on to the group now, or its threads run on and abort the interpreter while
        # it shuts down (pytorch/pytorch#190489). The model does: it has gone with train()'s frame. So do
        # the default arguments of torch.distributed.nn, if DDP is the first to import it.
        dist.destroy_process_group()
    if not finished:
        sys.exit(128 + signal.SIGTERM)


# The launch


def under_torchrun():
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()


def refuse(message):
    """Bad input: one line on stderr, exit status 2."""
    print(f"ddp_reference.py: {message}", file=sys.stderr)
    sys.exit(2)


def launch(args):
    """Start the job's processes and wait for them, or be one, where torchrun has started this one.

    Returns the exit status.
    """
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

    # glibc reads these when a process starts. Otherwise it hands the memory of large tensors back to
    # the system after each step and faults it in again, page by page, in the next.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until a worker is ready for it
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
    finally:
        for process in context.processes:
            process.kill()
    return 0


# The command line


class Parser(argparse.ArgumentParser):
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


def parse_args(argv=None):
    """The command line, checked before any process starts; what is left open is decided here."""
    parser = Parser(description="Data-parallel training of a small test net, on all GPUs or on the CPU.",
                    epilog="""examples:
  bash run.sh                                 the main job: about ten seconds on two cores
  bash run.sh --nproc-per-node 4 --epochs 2   four processes on this machine
  bash run.sh --accumulate 4 --amp            larger steps, bfloat16 arithmetic""",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    job = parser.add_argument_group("the job")
    job.add_argument("--nproc-per-node", type=whole(1), metavar="N",
                     help="processes on this machine [one per GPU; without GPUs 2]")
    job.add_argument("--backend", choices=["nccl", "gloo"],
                     help="[nccl if every process has a GPU of its own, else gloo: processes share GPUs or "
                          "run on the CPU]")
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=whole(1), default=6, metavar="N", help="[%(default)s]")
    training.add_argument("--batch-size", type=whole(1), default=4, metavar="N",
                          help="samples a batch, on each process [%(default)s]")
    training.add_argument("--lr", type=positive, default=0.01, metavar="X",
                          help="learning rate of Adam, for a step over all processes: the step's batch grows "
                               "with their number, the rate does not [%(default)s]")
    training.add_argument("--accumulate", type=whole(1), default=1, metavar="K",
                          help="batches a step [%(default)s]")
    training.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does")
    training.add_argument("--sync-bn", action="store_true",
                          help="BatchNorm over the batches of all processes (GPUs only)")
    training.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="S",
                          help="of the data, the order and the initial weights [%(default)s]")
    training.add_argument("--log-interval", type=whole(1), default=10, metavar="N",
                          help="steps between two looks at the loss; each waits for the device [%(default)s]")
    data = parser.add_argument_group("data")
    data.add_argument("--num-samples", type=whole(1), default=100, metavar="N",
                      help="samples to train on [%(default)s]")
    data.add_argument("--length", type=whole(2), default=10000, metavar="L",
                      help="positions a sample [%(default)s]")
    data.add_argument("--drop-last", action="store_true",
                      help="leave out what does not fill a batch on every process")
    data.add_argument("--num-workers", type=whole(0), default=0, metavar="N",
                      help="loader processes for each process; 0: it loads by itself [%(default)s]")
    resuming = parser.add_argument_group("resuming")
    resuming.add_argument("--checkpoint", metavar="PATH",
                          help="resume from this file if it exists; write it after each epoch and on SIGTERM")
    resuming.add_argument("--checkpoint-every", type=whole(1), metavar="N", help="and after every N steps")
    args = parser.parse_args(argv)

    gpus = torch.cuda.device_count()
    if under_torchrun():
        if args.nproc_per_node:
            refuse("--nproc-per-node is torchrun's own here: give it to torchrun, before the file's name")
        args.nproc_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        world_size = int(os.environ["WORLD_SIZE"])
    else:
        args.nproc_per_node = world_size = args.nproc_per_node or gpus or 2
    if args.backend is None:
        args.backend = "nccl" if args.nproc_per_node <= gpus else "gloo"
    if args.backend == "nccl" and args.nproc_per_node > gpus:
        refuse(f"NCCL needs a GPU for each process, and {args.nproc_per_node} processes have {gpus}: "
                     f"use --backend gloo" + (", which lets them share" if gpus else ""))
    if args.sync_bn and not gpus:
        refuse("--sync-bn needs GPUs: PyTorch's SyncBatchNorm does not run on a CPU")
    if args.drop_last and args.num_samples // world_size < args.batch_size:
        refuse(f"--drop-last leaves nothing to train on: {args.num_samples} samples on {world_size} "
                     f"processes do not fill one batch of {args.batch_size}")
    args.job = {"number of samples": args.num_samples, "length": args.length, "seed": args.seed}
    if args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint-every needs --checkpoint PATH")
    if args.checkpoint:
        folder = os.path.dirname(os.path.realpath(args.checkpoint))
        if not os.access(folder, os.W_OK | os.X_OK):
            refuse(f"--checkpoint {args.checkpoint}: {folder} is not a folder that can be written to")
        try:
            load_checkpoint(args.checkpoint, args.job, ConvNet(), "cpu")
        except ValueError as error:
            refuse(error)
    return args


if __name__ == "__main__":
    sys.exit(launch(parse_args()))
