"""Data-parallel training with PyTorch in one file: to run, to copy from and to read.

    bash run.sh                      # train: a process per GPU (NCCL), or two on the CPU (gloo)
    bash run.sh cases                # which samples each rank reads; --num-samples N: in a case of your own
    bash run.sh write-shards DIR     # the synthetic dataset as tar shards
    torchrun --standalone --nproc-per-node=4 ddp_reference.py
    torchrun --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 --nproc-per-node=8 ddp_reference.py

Lines at which the processes meet or differ end in a comment that begins with DDP.
"""

import argparse, contextlib, functools, glob, hashlib, io, itertools, json, math, os, re, signal, sys
import tarfile, tempfile, threading, time, traceback, warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # early: see worker()
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate


# ---- Your task: the data and the net
class SyntheticDataset(Dataset):
    """`num_samples` random signals with a label at every position.

    Item i is (x, y): x float32 (3, length), standard normal; y int64 (length,), the channel of x with the
    largest sum over the position and its two neighbours. It depends on (seed, i) alone: from NumPy's
    global generator all loader workers would draw the same (pytorch/pytorch#5059).
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


class ConvNet(nn.Module):
    """Three Conv1d/BatchNorm1d layers: float32 (N, 3, L) to logits (N, num_classes, L)."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.conv2, self.bn2 = nn.Conv1d(16, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.conv3, self.bn3 = nn.Conv1d(32, num_classes, 3, padding=1), nn.BatchNorm1d(num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))  # no ReLU: cross entropy takes logits of either sign


def make_task(args):
    """(training data, validation data, net): the one function to change for your own.

    All processes call it after torch.manual_seed(args.seed), so they begin with the same net: any that
    F.cross_entropy(module(x), y) can train for integer y, with the same parameters in eval mode. The data:
    map-style datasets of (x, y), split by the sampler below, or an IterableDataset that splits itself by
    rank and loader worker, with len(), this rank's samples, and set_epoch(epoch, start): ShardStream, below.
    """
    if args.shards:
        return (ShardStream(args.shards, args.samples_per_epoch, seed=args.seed),
                ShardStream(args.val_shards, resampled=False), ConvNet())
    return (SyntheticDataset(args.num_samples, args.length, args.seed),
            SyntheticDataset(25, args.length, args.seed + 1), ConvNet())


# ---- Which samples a rank reads
class DistributedSampler(Sampler):
    """The indices that one of `num_replicas` ranks reads in an epoch.

    The epoch's order is a permutation of the dataset that depends on (seed, epoch) alone, so all ranks know
    it. Of W ranks, rank r reads positions r, r + W, r + 2W, ... So after k samples on each rank exactly
    the first k * W positions have been read: one number, `start`, says how far the job has come, and any
    number of ranks can go on from there.

    A drop-in for torch.utils.data.distributed.DistributedSampler: same arguments, attributes, indices, but
    4 bytes a sample where torch holds a list of Python ints (pytorch/pytorch#45427).

    drop_last: leave out the last samples of the order if there is not one for every rank.
    pad: otherwise repeat samples from the start of the order until all ranks have equally many, as training
        needs: every step is a collective. With pad=False and drop_last=False each sample is read exactly once
        and some ranks read one less: for evaluation (pytorch/pytorch#25162).
    Raises ValueError for a number out of range, TypeError for a dataset without a length.
    """

    def __init__(self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False,
                 *, pad=True):
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank is {rank}, but must be in [0, num_replicas), here [0, {num_replicas})")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last, self.pad = shuffle, seed, drop_last, pad
        self.set_epoch(0)

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order, without its first `start` samples, which the job has already read."""
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"start is {start}, but must be in [0, {len(self.dataset)}]")
        self.total_size = len(self.dataset) - start
        if self.drop_last:
            self.total_size -= self.total_size % self.num_replicas
        elif self.pad:
            self.total_size += -self.total_size % self.num_replicas
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.epoch, self.start, self._passes = epoch, start, 0

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        n = len(self.dataset)
        # Positions in the order; those from n on are padding and wrap around to its start.
        positions = range(self.start + self.rank, self.start + self.total_size, self.num_replicas)
        if not self.shuffle:
            return (position % n for position in positions)
        self._passes += 1
        if self._passes == 2:  # torch stays silent and trains on one order for ever: pytorch/pytorch#11324
            warnings.warn(f"second pass over the order of epoch {self.epoch}: call set_epoch(epoch) "
                          "before each epoch, or every epoch has the same order", stacklevel=2)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(n, generator=generator, dtype=torch.int32 if n < 2**31 else torch.int64)
        # contiguous() copies this rank's part, and the whole order is freed on return.
        mine = order[positions.start:positions.stop:positions.step].contiguous()
        padding = [int(order[position % n]) for position in positions[len(mine):]]
        # In chunks: a list of all indices would take 36 bytes for each.
        chunks = (chunk.tolist() for chunk in mine.split(8192))
        return itertools.chain(itertools.chain.from_iterable(chunks), padding)


# ---- A step, evaluation, checkpoints
def batch_sums(loss, logits, y):
    """float64 (3,) on the device: of one batch the sum of the losses, the correct labels, the labels."""
    labels = (y >= 0).sum().double()  # cross_entropy ignores -100
    correct = (logits.detach().max(dim=1).indices == y).sum()  # argmax: ten times slower on CPUs
    return torch.stack([loss.detach() * labels, correct, labels])


def all_reduce_sums(sums):
    """The batch_sums of all ranks, added up, as numbers. (Means over batches cannot be added up.)"""
    sums = sums.clone()
    if dist.is_initialized():
        dist.all_reduce(sums)  # DDP: all-reduce
    return sums.tolist()


def train_steps(model, loader, optimizer, device, sums, accumulate=1, amp=False):
    """Train on what the loader gives; yield this rank's samples so far, before each step and after the last.

    model: wrapped in DistributedDataParallel or not; all ranks must get equally many batches.
    sums: float64 (3,) on the device, to which the batch_sums are added; .item() would wait for the GPU.
    accumulate: micro-batches in a step; its gradient is their mean, also in the last, shorter one.
    """
    model.train()
    batches, samples = iter(loader), 0
    yield samples
    while micro_batches := list(itertools.islice(batches, accumulate)):
        for i, (x, y) in enumerate(micro_batches, 1):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            no_sync = isinstance(model, DistributedDataParallel) and i < len(micro_batches)
            with model.no_sync() if no_sync else contextlib.nullcontext():  # DDP: one all-reduce a step
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                    logits = model(x)  # DDP: broadcast of rank 0's buffers, once a step
                    loss = F.cross_entropy(logits, y)
                (loss / len(micro_batches)).backward()  # DDP: all-reduce of the gradients
            sums += batch_sums(loss, logits, y)
            samples += len(x)
        optimizer.step()
        optimizer.zero_grad()
        yield samples


@torch.inference_mode()
def evaluate(model, loader, device):
    """(loss, accuracy) over the loaders of all ranks, however many; leaves the model in eval mode."""
    # Not the wrapper, which broadcasts buffers: a rank without a batch would not take part.
    module = (model.module if isinstance(model, DistributedDataParallel) else model).eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        logits = module(x)
        sums += batch_sums(F.cross_entropy(logits, y), logits, y)
    loss_sum, correct, labels = all_reduce_sums(sums)
    return loss_sum / labels, correct / labels


def digest(module):
    """SHA-256 over all parameters and buffers: equal digests, equal modules."""
    sha256 = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha256.update(name.encode())
        sha256.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


class InputError(ValueError):
    """Input that cannot work: one line on stderr, status 2."""


def save_checkpoint(path, state):
    """Write a checkpoint. At every moment, `path` is the old one or the new one, complete."""
    folder, name = os.path.split(os.path.realpath(path))
    temporary = os.path.join(folder, f".{name}.new")  # the next one writes over what a kill leaves
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the data before the name: a crash must not leave an empty file
    os.replace(temporary, os.path.join(folder, name))
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # and now the name
    os.close(directory)


def resume(path, job, module, optimizer, device):
    """Load the checkpoint at path, if there is one: (epoch, samples of that epoch already read, their sums).

    job: a dict of what must be the same to go on. Raises InputError, naming what is wrong with the file.
    """
    state = dict(epoch=0, samples=0, sums=[0.0, 0.0, 0.0])
    if path and os.path.exists(path):
        try:
            # To the CPU: else all ranks load onto rank 0's GPU. (Adam's counters on a GPU stall each step.)
            state = torch.load(path, map_location="cpu", weights_only=True)
            saved = dict(state["job"])
        except Exception as error:  # which one depends on where the damage is
            raise InputError(f"{path} is damaged or not a checkpoint ({type(error).__name__})") from error
        for name in job | saved:
            if job.get(name) != saved.get(name):
                raise InputError(f"{path} is the checkpoint of another job: its {name} is {saved.get(name)}, "
                                 f"but here it is {job.get(name)}")
        module.load_state_dict(state["module"])
        for group, saved_group in zip(optimizer.param_groups, state["optimizer"]["param_groups"]):
            saved_group["lr"] = group["lr"]  # the command line's
        optimizer.load_state_dict(state["optimizer"])
    place = [state["epoch"], state["samples"]]
    *totals, ranks = all_reduce_sums(torch.tensor([*place, 1], dtype=torch.float64, device=device))
    if totals != [ranks * number for number in place]:
        raise InputError(f"the ranks find different checkpoints: {path} must be one file for all")
    return *place, state["sums"]


# ---- The training loop
def end_with_parent(worker_id=None):
    """In a rank or loader worker: end with who started it. (PyTorch's own watches the fork server.)"""
    def wait():
        if parent := mp.parent_process():  # not under torchrun
            parent.join()
            os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


def make_loader(dataset, device, args, drop_last=False, **sampling):
    """(this rank's loader of a dataset, the object whose set_epoch says what is read)."""
    sampler = None if isinstance(dataset, IterableDataset) else DistributedSampler(
        dataset, seed=args.seed, drop_last=drop_last, **sampling)  # DDP: the sampler
    options = dict(generator=torch.Generator().manual_seed(args.seed + dist.get_rank()))  # DDP: own seeds
    if args.num_workers:
        # Not fork, says DDP's documentation: threads of CUDA and NCCL may hold locks. A fork server is a
        # clean process that imports torch once; with spawn every worker does.
        mp.set_forkserver_preload(["torch.utils.data", "torch.distributed.nn"])
        options |= dict(multiprocessing_context="forkserver", worker_init_fn=end_with_parent)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.num_workers,
                        drop_last=drop_last, pin_memory=device.type == "cuda", **options)
    return loader, dataset if sampler is None else sampler


def settle_buckets(model, dataset, device):
    """Have DDP lay out its gradient buckets for good, before the first step (eval: no buffer changes).

    It does so after its first backward, by the order in which gradients came, and the layout decides in which
    order three or more ranks are added up: a job resumed with the first layout drifts in the last bit.
    """
    x, y = default_collate([next(iter(dataset))])
    if y.is_floating_point():
        raise InputError("labels must be integers: cross_entropy takes floats as probabilities")
    model.eval()
    F.cross_entropy(model(x.to(device)), y.to(device)).backward()  # DDP: all-reduce
    model.zero_grad()


def seed_step(seed, epoch, samples, rank):
    """Seed PyTorch for the step after `samples` samples of the epoch, in a tenth of a millisecond.

    So dropout and augmentation differ between ranks and steps, and are the same after resuming. Not so with
    NumPy's generator or in loader workers: draw from (seed, index) there, as SyntheticDataset does.
    """
    torch.manual_seed(int(np.random.SeedSequence((seed, epoch, samples, rank)).generate_state(1, "u8")[0]))


def train(args, device):
    """One rank's part of the job: task, sampler, wrapper, resume; then train, evaluate, report, save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = functools.partial(print, flush=True) if rank == 0 else lambda *_, **__: None  # DDP: rank 0 prints
    torch.manual_seed(args.seed)
    train_set, val_set, module = make_task(args)
    loader, sampler = make_loader(train_set, device, args, args.drop_last)
    val_loader, _ = make_loader(val_set, device, args, shuffle=False, pad=False)
    num_samples = len(train_set) * (world_size if sampler is train_set else 1)  # over all ranks
    module.to(device)
    if args.sync_bn:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # DDP: all-gather of batch statistics
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    job = dict(data=type(train_set).__name__, samples=args.samples_per_epoch or num_samples, seed=args.seed)
    job |= {"--length": args.length} | {name: list(x.shape) for name, x in module.state_dict().items()}
    first_epoch, samples, saved_sums = resume(args.checkpoint, job, module, optimizer, device)
    if args.parallel == "dp":
        model = nn.DataParallel(module)
    else:  # BatchNorm normalises a rank's batch by its own statistics; evaluation uses rank 0's
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)  # DDP: broadcast of the net
    settle_buckets(model, train_set, device)  # DDP: the layout of its buckets

    def save(epoch, samples, sums):
        if not all(tensor.isfinite().all() for tensor in [torch.tensor(sums), *module.parameters()]):
            raise FloatingPointError(f"before epoch {epoch}, sample {samples}: loss or net not finite")
        if rank == 0 and args.checkpoint:  # DDP: rank 0 saves
            states = dict(module=module.state_dict(), optimizer=optimizer.state_dict())
            save_checkpoint(args.checkpoint, dict(job=job, epoch=epoch, samples=samples, sums=sums, **states))

    say(args.backend if args.parallel == "ddp" else "parallel dp", f"world size {world_size}", device.type,
        f"torch {torch.__version__}", sep=", ")
    if first_epoch or samples:
        say(f"resuming from {args.checkpoint}: epoch {first_epoch}, sample {samples} of {num_samples}")
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch, samples)  # DDP: a new order, the same on every rank
        sums = torch.tensor(saved_sums, dtype=torch.float64, device=device) * (rank == 0)
        start, begin = samples, time.perf_counter()
        first_step = math.ceil(start / (args.batch_size * args.accumulate * world_size))
        last_step = first_step + math.ceil(len(loader) / args.accumulate)
        steps = train_steps(model, loader, optimizer, device, sums, args.accumulate, args.amp)
        for step, read in enumerate(steps, first_step):
            samples = min(start + read * world_size, num_samples)
            seed_step(args.seed, epoch, samples, rank)  # DDP: random numbers of its own
            rate = read * world_size / (time.perf_counter() - begin)
            if sys.stdout.isatty():
                say(f"epoch {epoch} step {step}/{last_step} | {rate:.1f} samples/s", end="  \r")
            if read and args.checkpoint_every and step % args.checkpoint_every == 0:
                save(epoch, samples, all_reduce_sums(sums))
        loss_sum, correct, labels = all_reduce_sums(sums)
        if not labels:
            raise InputError("nothing to train on: no rank has enough samples for a batch")
        rate = read * world_size / (time.perf_counter() - begin)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)  # DDP: broadcast; all evaluate rank 0's statistics
        val_loss, val_accuracy = evaluate(module, val_loader, device)
        say(f"epoch {epoch} | loss {loss_sum / labels:.4f} accuracy {correct / labels:.3f} | "
            f"val_loss {val_loss:.4f} val_accuracy {val_accuracy:.3f} | {rate:.1f} samples/s")
        samples, saved_sums = 0, [0.0] * 3
        save(epoch + 1, samples, saved_sums)
    say(f"parameters sha256 {digest(module)}")


# ---- One process of the job, and the launch
def worker(local_rank, args, init_method="env://"):
    """One process of the job, the local_rank-th of this machine: device, process group, then train()."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process: no traceback
    end_with_parent()
    rank, world_size = local_rank, args.nproc_per_node
    if "RANK" in os.environ:  # under torchrun
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.nproc_per_node == world_size:  # one machine: listen on loopback alone
        for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    if "OMP_NUM_THREADS" not in os.environ:  # else each process takes all cores; torchrun sets it to 1
        torch.set_num_threads(max(1, torch.get_num_threads() // args.nproc_per_node))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        device = torch.device("cpu")
        if torch.cuda.is_available():  # by the local rank: the global one counts over all machines
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size))
        if args.nproc_per_node == world_size:
            # torchrun keeps its store over a restart, and in it the addresses of dead ranks
            # (pytorch/pytorch#135712). Not on several machines: each counts its own restarts (#108158).
            store = dist.PrefixStore(f"restart {restart}", store)
        dist.init_process_group(args.backend, store=store, rank=rank, world_size=world_size,  # DDP: join
                                device_id=device if args.backend == "nccl" else None)
        train(args, device)
    except Exception as error:
        status, message = 1, f"rank {rank} failed:\n{traceback.format_exc()}"
        if isinstance(error, InputError):  # a loader worker's follows a traceback
            reason = str(error).rpartition("InputError: ")[2].strip()
            status, message = 2, f"{os.path.basename(sys.argv[0])}: error: {reason}"
        with contextlib.suppress(Exception):  # there may be no store, or no longer
            if store.add(f"failed {restart}", 1) > 1:  # the first says why; the others fail because it left
                time.sleep(1)
                os._exit(status)
        print(message, file=sys.stderr, flush=True)
        # Destroying the group could wait for ranks that wait for this one (pytorch/torchtitan#1342).
        os._exit(status)
    # A group still referenced aborts the interpreter at exit (pytorch/pytorch#190489). So train's model
    # is gone by now, and torch.distributed.nn, whose default arguments would hold it, was imported early.
    dist.destroy_process_group()  # DDP: leave


def launch(args):
    """Start the job's processes and wait for them; return the exit status if it is not 0."""
    # Else glibc gives large tensors' memory back in each step: a quarter slower on a CPU.
    # The third hides a warning after a kill.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: no traceback of an import of torch
    with tempfile.TemporaryDirectory() as folder:  # a port could be another job's (pytorch/pytorch#126510)
        context = mp.spawn(worker, (args, f"file://{folder}/store"), args.nproc_per_node, join=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while not context.join(grace_period=3):
                pass
        except mp.ProcessExitedException as error:
            if error.signal_name not in (None, "SIGINT"):  # one that raised has told why
                print(f"rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
            return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for process in context.processes:
                process.kill()


# ---- Tar shards, for data too large to index
def read_shard(path):
    """Yield the samples of a tar file in webdataset's format, in order: a dict of "__key__" and its members.

    `a/017.x.npy` is "x.npy" of key "a/017". npy becomes an array, cls an int, json what it says, txt a str,
    the rest stays bytes; nothing is unpacked or unpickled. Raises InputError, with file and member.
    """
    decoders = {"npy": lambda data: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False),
                "cls": int, "json": json.loads, "txt": bytes.decode}
    sample, member = {}, None
    with open(path, "rb") as file:
        try:
            tar = tarfile.open(fileobj=file, mode="r:")
            while member := tar.next():
                tar.members.clear()  # or it would keep them all
                name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                if not name or not member.isreg() or member.issparse():
                    continue
                key, extension = name[1], name[2].lower()
                if sample.get("__key__", key) != key:
                    yield sample
                    sample = {}
                file.seek(member.offset_data)  # tarfile's reader costs as much again
                decode = decoders.get(extension.rpartition(".")[2], bytes)
                sample |= {"__key__": key, extension: decode(file.read(member.size))}
            file.seek(tar.offset)  # tarfile takes a damaged header for the end; the real end is zeros
            if file.read(512) != bytes(512) or not sample:
                raise ValueError("damaged, cut off or without a sample")
        except Exception as error:  # damaged headers raise many kinds
            raise InputError(f"shard {path}, {member.name if member else 'at its end'}: {error}") from error
    yield sample


class ShardStream(IterableDataset):
    """(x, y) tensors from the x.npy and y.npy in tar shards, given as paths or glob patterns.

    resampled=True, for training: every loader worker of every rank draws shards with replacement, mixes the
        samples in a buffer of shuffle_buffer, and stops at its part of samples_per_epoch, counted over all
        ranks: none waits for one whose shards have run out (webdataset#225). A part smaller than a shard
        never reaches its end. What is drawn depends on (seed, epoch, start, rank, worker).
    resampled=False, for evaluation, where no step is a collective: the shards are split over ranks and loader
        workers, and each sample is read exactly once. Raises InputError, as read_shard does.
    """

    def __init__(self, shards, samples_per_epoch=None, *, resampled=True, shuffle_buffer=1000, seed=0,
                 num_replicas=None, rank=None):
        self.shards = [path for pattern in shards for path in sorted(glob.glob(pattern)) or [pattern]]
        self.samples_per_epoch, self.resampled = samples_per_epoch, resampled
        self.shuffle_buffer, self.seed, self.epoch, self.start = shuffle_buffer, seed, 0, 0
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if missing := [path for path in self.shards if not os.path.isfile(path)]:
            raise InputError(f"there is no shard {missing[0]}")

    def set_epoch(self, epoch, start=0):
        """Choose what to draw; of the epoch the job has already read `start` samples."""
        self.epoch, self.start = epoch, start

    def __len__(self):
        return math.ceil(max(0, self.samples_per_epoch - self.start) / self.num_replicas)

    def __iter__(self):
        info, buffer = torch.utils.data.get_worker_info(), []
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        generator = np.random.default_rng((self.seed, self.epoch, self.start, self.rank, worker))
        paths, reads, size = self.shards[self.rank::self.num_replicas][worker::num_workers], None, 1
        if self.resampled:
            paths = (self.shards[generator.integers(len(self.shards))] for _ in itertools.count())
            count = len(range(worker, len(self), num_workers))
            size = max(1, min(self.shuffle_buffer, count))
            reads = count + size - 1
        samples = ((path, sample) for path in paths for sample in read_shard(path))
        for path, sample in itertools.islice(samples, reads):
            if not {"x.npy", "y.npy"} <= sample.keys():
                raise InputError(f"shard {path}, sample {sample['__key__']}: x.npy or y.npy is missing")
            buffer.append((torch.from_numpy(sample["x.npy"]), torch.from_numpy(sample["y.npy"])))
            if len(buffer) == size:
                yield buffer.pop(generator.integers(size))


def write_shards(folder, dataset, shard_size=25):
    """Write the (x, y) of a dataset as tar shards into a folder; FileExistsError if it has such already."""
    os.makedirs(folder, exist_ok=True)
    for first in range(0, len(dataset), shard_size):
        with tarfile.open(os.path.join(folder, f"{first // shard_size:06d}.tar"), "x") as tar:
            for i in range(first, min(first + shard_size, len(dataset))):
                for name, tensor in zip("xy", dataset[i]):
                    data = io.BytesIO()
                    np.save(data, tensor.numpy())
                    member = tarfile.TarInfo(f"{i:06d}.{name}.npy")
                    member.size = data.tell()
                    tar.addfile(member, io.BytesIO(data.getvalue()))


CASES = [  # the sampler at work: title, samples, with a sampler, set_epoch called, drop_last
    ("1: no sampler: every rank reads everything", 8, False, False, True),
    ("2: with the sampler: ranks split the data, the same way every epoch", 8, True, False, True),
    ("3: set_epoch: a new split each epoch", 8, True, True, True),
    ("4: 3 samples a rank: short batches are kept", 6, True, False, False),
    ("4, dropping the short batch: a batch of 4 never fills, nothing is read", 6, True, False, True),
    ("5: 5 samples on 2 ranks: one is repeated to make 6", 5, True, False, False),
    ("5, with set_epoch: it is the first of that epoch's order", 5, True, True, False),
    ("6: last batches of one sample, which BatchNorm may refuse", 10, True, False, False),
    ("7: drop_last: that batch is gone", 10, True, False, True),
]


def show_case(title, num_samples, with_sampler, set_epoch, drop_last, num_replicas=2, batch_size=4):
    """Print the batches that each rank reads in two epochs (*: again). drop_last: of sampler and loader."""
    print(f"\ncase {title}\n{num_samples} samples, {num_replicas} ranks, batches of {batch_size}")
    for epoch in range(2):
        unread = set(range(num_samples))
        for rank in range(num_replicas):
            sampler = range(num_samples)
            if with_sampler:
                sampler = DistributedSampler(sampler, num_replicas, rank, drop_last=drop_last)
                sampler.set_epoch(epoch if set_epoch else 0)
            print(f"  epoch {epoch}  rank {rank}", end="")
            for batch in BatchSampler(sampler, batch_size, drop_last):
                print("  [" + ", ".join(f"{i}" if i in unread else f"{i}*" for i in batch) + "]", end="")
                unread -= set(batch)
            print()
        if unread:
            print(f"  epoch {epoch}  read by no rank:", *sorted(unread))


# ---- The command line
def number(kind, low, high):
    """An argparse type: a number from low to high."""
    def parse(text):
        if not low <= kind(text) <= high:
            raise ValueError
        return kind(text)
    parse.__name__ = f"{kind.__name__} from {low} to {high}"  # argparse: invalid int from 1 to 9 value: '0'
    return parse


def make_parser():
    """The options of all commands; parser.error prints one line and exits with status 2."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, number(int, 1, 2**40)
    add("command", nargs="?", choices=["train", "cases", "write-shards"], default="train", help="[train]")
    add("folder", nargs="?", metavar="DIR", help="of write-shards")
    add("--nproc-per-node", type=number(int, 1, 4096), metavar="N", help="[one per GPU, without GPUs 2]")
    add("--backend", choices=["nccl", "gloo"], help="[nccl if each process has its own GPU, else gloo]")
    add("--parallel", choices=["ddp", "dp"], default="ddp", help="dp: nn.DataParallel in one process [ddp]")
    add("--num-workers", type=number(int, 0, 999), default=0, metavar="N", help="loader workers of each [0]")
    add("--epochs", type=count, default=6, metavar="N", help="[6]")
    add("--batch-size", type=count, default=4, metavar="N", help="samples in a batch of one process [4]")
    add("--accumulate", type=count, default=1, metavar="K", help="micro-batches in a step [1]")
    add("--lr", type=number(float, 1e-12, 1e30), default=0.01, metavar="X", help="not scaled [0.01]")
    add("--drop-last", action="store_true", help="leave out what does not fill a batch of each process")
    add("--amp", action="store_true", help="run the net under bfloat16 autocast")
    add("--sync-bn", action="store_true", help="BatchNorm over the batches of all processes (GPUs only)")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, metavar="S", help="of all that is random [0]")
    add("--num-samples", type=count, metavar="N", help="in the synthetic dataset [100]")
    add("--length", type=number(int, 2, 2**28), default=10000, metavar="L", help="positions a sample [10000]")
    add("--shards", nargs="+", metavar="TAR", help="train on tar shards instead: paths or glob patterns")
    add("--val-shards", nargs="+", metavar="TAR", help="and evaluate on these")
    add("--samples-per-epoch", type=count, metavar="N", help="over all processes, of the shards")
    add("--shard-size", type=count, default=25, metavar="M", help="samples in a written shard [25]")
    add("--checkpoint", metavar="PATH", help="resume from this file if it exists; write it after each epoch")
    add("--checkpoint-every", type=count, metavar="N", help="and after every N steps")
    return parser


def check_job(args, refuse):
    """Decide what a job's options leave open; refuse what cannot work."""
    gpus, torchrun = torch.cuda.device_count(), "RANK" in os.environ
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says it in several lines
        if gpus and not torch.cuda.is_available():
            refuse(f"CUDA cannot start on {gpus} GPUs: mend the driver, or set CUDA_VISIBLE_DEVICES=")
    if torchrun and not {"LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        refuse("RANK is set, but not LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR: use torchrun")
    if torchrun and args.nproc_per_node:
        refuse("--nproc-per-node is torchrun's own: give it before the file's name")
    if args.parallel == "dp":
        if torchrun or (args.nproc_per_node or 1) > 1 or args.sync_bn or args.amp:
            refuse("--parallel dp is one process, without --sync-bn and --amp (its threads forget the dtype)")
        args.nproc_per_node, args.batch_size = 1, args.batch_size * max(1, gpus)  # one loader feeds all GPUs
    args.nproc_per_node = int(os.getenv("LOCAL_WORLD_SIZE")) if torchrun else args.nproc_per_node or gpus or 2
    # A launcher may show each process its own GPU alone. (If they share it: --backend gloo.)
    gpu_each = args.nproc_per_node <= gpus or torchrun and gpus == 1
    args.backend = args.backend or ("nccl" if gpu_each else "gloo")
    if args.backend == "nccl" and not gpu_each:
        refuse(f"NCCL needs a GPU a process, {args.nproc_per_node} and not {gpus}: use --backend gloo")
    if args.sync_bn and not gpus:
        refuse("--sync-bn needs GPUs: SyncBatchNorm runs on nothing else")
    if len({bool(args.shards), bool(args.val_shards), bool(args.samples_per_epoch)}) > 1:
        refuse("--shards, --val-shards and --samples-per-epoch go together")
    if args.checkpoint == "" or args.checkpoint_every and not args.checkpoint:
        refuse("--checkpoint needs a PATH, and --checkpoint-every needs --checkpoint")
    if args.checkpoint:
        try:
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(args.checkpoint))).close()
        except OSError as error:
            refuse(f"--checkpoint {args.checkpoint}: cannot create a file there: {error.strerror}")


def main(argv):
    """The program; returns the exit status if it is not 0."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.command == "write-shards") != bool(args.folder):
        parser.error("write-shards needs a DIR, and nothing else takes one")
    if args.command == "cases":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `cases | head` is no error
        options = args.drop_last, args.nproc_per_node or 2, args.batch_size
        for case in [("of your own", args.num_samples, True, True, *options)] if args.num_samples else CASES:
            show_case(*case)
        return 0
    args.num_samples = args.num_samples or 100
    if args.command == "train":
        check_job(args, parser.error)
        return worker(int(os.environ["LOCAL_RANK"]), args) if "RANK" in os.environ else launch(args)
    try:
        write_shards(args.folder, SyntheticDataset(args.num_samples, args.length, args.seed), args.shard_size)
    except OSError as error:
        parser.error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
