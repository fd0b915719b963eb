"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                 # all of them; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson       # the six lessons: the acceptance test of a machine with GPUs
    bash run.sh test experiments     # print the table of Lesson 2

First come six lessons: what data-parallel training guarantees. Each compares what ranks do with an
oracle: PyTorch's own sampler, one process that has the whole batch, or a loop in plain PyTorch.
Then come the other guarantees, in the order of the chapters of ddp_reference.py (the lessons alone
cover chapters 1, 7 and 8).

One helper, between the lessons and the chapters, starts ranks. run_job(3, options) runs a whole job
on three ranks and returns what each rank printed. run_job(3, train=function) calls
function(args, device) on each of three ranks, in place of the training.

To test a new option of training, add it to OPTIONS in Lesson 6 and to plain_loop() there. Then let
ddp_reference.py ignore the option, and see the lesson fail.
"""

import contextlib
import copy
import io
import itertools
import logging
import os
import pathlib
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
import unittest
from functools import partial
from unittest import TestCase, mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

HERE = pathlib.Path(__file__).resolve().parent
README = (HERE / "README.md").read_text()
GPUS = torch.cuda.device_count()


def setUpModule():
    """Work in an empty folder, and say on what the ranks run."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    logging.disable()  # PyTorch would log each rank that it ends.
    if GPUS:
        print(f"Up to {GPUS} ranks run on NCCL, with a GPU each. More share the GPUs, on gloo.")
    else:
        print("The ranks run on gloo and the CPU, because PyTorch sees no GPU.")


# ---- Lesson 1: which samples a rank reads (DistributedSampler)
# Everything rests on one fact. Let each of W ranks read every W-th position of an order, in batches
# of B / W. Then the k-th batches of all ranks are together the positions kB to kB + B - 1, whatever
# W is. In other words: reading one index of each rank in turn gives the order back. To break it,
# leave out `+ self.rank` in DistributedSampler. Then every rank reads the samples of rank 0, and
# the first test prints which samples two ranks have read.
class Lesson1Sampler(TestCase):
    def test_on_any_number_of_ranks_and_after_any_stop_the_ranks_read_one_order_in_turn(self):
        dataset = range(24)
        order = list(TorchSampler(dataset, num_replicas=1, rank=0))
        for world_size, samples_read in itertools.product((1, 2, 3, 4, 6, 12), (0, 12)):
            ranks = []
            for rank in range(world_size):
                sampler = ddp.DistributedSampler(dataset, world_size, rank)
                sampler.set_epoch(0, samples_read)
                assert len(sampler) == (24 - samples_read) / world_size
                ranks.append(sampler)

            read_in_turn = list(itertools.chain.from_iterable(zip(*ranks, strict=True)))
            assert read_in_turn == order[samples_read:], f"{world_size} ranks read {read_in_turn}"

    def test_the_indices_and_the_attributes_are_those_of_pytorchs_sampler(self):
        # 70000 samples, because our permutation is of int32, and PyTorch's of int64.
        for num_samples, num_replicas, shuffle, drop_last in itertools.product(
            (*range(20), 70000), range(1, 7), (True, False), (True, False)
        ):
            for rank in range(num_replicas):
                # All arguments of the samplers in their order. The seed is 7.
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours = ddp.DistributedSampler(*arguments)
                torchs = TorchSampler(*arguments)

                assert list(ours) == list(torchs), f"the indices differ for {arguments}"
                # Ours has the attributes of PyTorch's, and others: <= is the relation of subsets.
                assert vars(torchs).items() <= vars(ours).items(), f"{vars(torchs)} {vars(ours)}"


# ---- Lesson 2: seven experiments (DistributedSampler)
# Two ranks read batches of 4 by a DataLoader, for two epochs. The README tells what each experiment
# teaches. The numbers are older than this project: a job on two GPUs had printed them, with
# PyTorch's sampler. To break it, leave out `% len(order)` in DistributedSampler. Then experiment 5,
# in which a sample is read twice, ends with an IndexError.
EXPERIMENTS = """
                  epoch 0               epoch 1
1. 8 samples, no sampler
         rank 0   [0,1,2,3] [4,5,6,7]   [0,1,2,3] [4,5,6,7]
         rank 1   [0,1,2,3] [4,5,6,7]   [0,1,2,3] [4,5,6,7]
2. 8 samples
         rank 0   [4,7,2,1]             [4,7,2,1]
         rank 1   [0,3,5,6]             [0,3,5,6]
3. 8 samples, set_epoch
         rank 0   [4,7,2,1]             [5,2,7,1]
         rank 1   [0,3,5,6]             [4,6,3,0]
4. 6 samples
         rank 0   [2,3,1]               [2,3,1]
         rank 1   [5,0,4]               [5,0,4]
   6 samples, drop_last
         rank 0
         rank 1
5. 5 samples
         rank 0   [4,1,2]               [4,1,2]
         rank 1   [0,3,4]               [0,3,4]
   5 samples, set_epoch
         rank 0   [4,1,2]               [0,2,1]
         rank 1   [0,3,4]               [4,3,0]
6. 10 samples
         rank 0   [4,7,3,0] [6]         [4,7,3,0] [6]
         rank 1   [1,5,9,8] [2]         [1,5,9,8] [2]
7. 10 samples, drop_last
         rank 0   [4,7,3,0]             [4,7,3,0]
         rank 1   [1,5,9,8]             [1,5,9,8]"""


def experiments(sampler_class):
    """Do the experiments, with samplers of this class: return the table."""
    table = "\n                  epoch 0               epoch 1"
    for title in re.findall(".* samples.*", EXPERIMENTS):
        table += f"\n{title}"
        dataset = range(int(title[3:5]))  # The titles also say what else to do.
        for rank in range(2):
            sampler = None if "no sampler" in title else sampler_class(dataset, 2, rank)
            loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in title)
            line = f"\n         rank {rank}"
            for epoch in range(2):
                if "set_epoch" in title:
                    sampler.set_epoch(epoch)
                batches = " ".join(f"{batch.tolist()}" for batch in loader)
                line += f"   {batches.replace(', ', ','):19}"
            table += line.rstrip()
    return table


class Lesson2Experiments(TestCase):
    def test_both_samplers_make_the_batches_that_the_readme_shows(self):
        assert EXPERIMENTS in README
        self.assertEqual(experiments(TorchSampler), EXPERIMENTS)
        with self.assertWarnsRegex(UserWarning, "order was read before: call set_epoch"):
            self.assertEqual(experiments(ddp.DistributedSampler), EXPERIMENTS)


# ---- Lesson 3: a step (train_step)
# Every rank ends a step with the parameters of one process that had the whole batch, even if ranks
# have unequal numbers of labels and compute their shares in micro-batches. DDP alone averages the
# ranks' gradients, so that a label counts for more on a rank with few labels. To break it, replace
# `dist.get_world_size()` by 1 in train_step(). Then the nets of two ranks differ from that of one.
def plain_net():
    """Return a net without BatchNorm, the same in every process.

    One of its parameters is frozen, and so never has a gradient.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))
    net[0].bias.requires_grad_(False)
    return net


class Ragged(ddp.SyntheticDataset):
    """Signals of length 40. Of each, none, some or all labels are ignored: they are -100."""

    def __init__(self, num_samples):
        super().__init__(num_samples, length=40, seed=0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[: index * 10 % 50] = -100
        return x, y


def whole_batch(dataset):
    """Return all samples of a dataset as one batch."""
    return next(iter(DataLoader(dataset, len(dataset))))


def share(sequence):
    """Return this rank's share of a sequence: every W-th item."""
    return sequence[dist.get_rank() :: dist.get_world_size()]


def compare_step(micro_batch_size, args, device):
    """On a rank: train on its share of a batch, and compare with one process that has the batch."""
    x, y = whole_batch(Ragged(12))
    expected = plain_net()
    F.cross_entropy(expected(x), y).backward()
    torch.optim.SGD(expected.parameters(), lr=1).step()

    net = plain_net().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)  # Adam would hide a wrong factor.
    ddp.train_step(model, optimizer, (share(x), share(y)), micro_batch_size)

    what = f"the net of rank {dist.get_rank()} of {dist.get_world_size()} ({micro_batch_size=})"
    assert_close(net.state_dict(), expected.state_dict(), what)
    ddp.train_step(model, optimizer, (share(x), torch.full_like(share(y), -100)), 12)
    assert_close(net.state_dict(), expected.state_dict(), f"after a step without labels {what}")


class Lesson3Step(TestCase):
    def test_on_any_number_of_ranks_a_step_is_that_of_one_process_with_the_whole_batch(self):
        for world_size, micro_batch_size in ((1, 5), (2, 6), (2, 4), (3, 1), (4, 3), (4, 2)):
            run_job(world_size, train=partial(compare_step, micro_batch_size))


# ---- Lesson 4: evaluation (evaluate)
# Loss and accuracy are those of one process with all samples, also if the shares of the ranks are
# unequal (25 samples), and if some ranks have no sample (2 samples on 4 ranks). PyTorch's sampler
# would repeat samples. To break it, leave out `dist.all_reduce(total)` in evaluate(). Then the
# means of two ranks differ: each rank has those of its own samples.
def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels of a dataset, in plain PyTorch."""
    x, y = whole_batch(dataset)
    logits = net.eval()(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return F.cross_entropy(logits, y).item(), accuracy.item()


def net_with_batch_norm():
    """Return a net that computes something else in training than in evaluation."""
    return nn.Sequential(nn.BatchNorm1d(3), plain_net())


def compare_evaluation(num_samples, args, device):
    """On a rank: evaluate its share of the samples, and compare with one process that has all."""
    expected = loss_and_accuracy(net_with_batch_norm(), Ragged(num_samples))

    net = net_with_batch_norm().to(device)
    net[0].running_mean += dist.get_rank()  # As after --local-bn: those of rank 0 count.
    means = ddp.evaluate(net, DataLoader(Ragged(num_samples), 4, sampler=share(range(num_samples))))

    what = f"the means of rank {dist.get_rank()} of {dist.get_world_size()}"
    assert_close(means, expected, f"{what} over {num_samples} samples")


class Lesson4Evaluation(TestCase):
    def test_on_any_number_of_ranks_the_means_are_those_of_one_process(self):
        for world_size, num_samples in ((1, 25), (2, 25), (3, 25), (4, 25), (4, 2)):
            run_job(world_size, train=partial(compare_evaluation, num_samples))


# ---- Lesson 5: BatchNorm over the job (convert_batch_norm)
# On any number of ranks, a BatchNorm layer that convert_batch_norm() has changed does what
# PyTorch's layer does in one process with the samples of all ranks, even if the ranks have
# unequally many. To break it, replace `backward = forward` in SumOverRanks by
# `backward = staticmethod(lambda ctx, gradient: gradient)`. Then the gradients of x differ on 2
# ranks, and the outputs do not. (On GPUs the layers become PyTorch's own nn.SyncBatchNorm, which
# does not use SumOverRanks.)
def run_layer(layer, x):
    """Return what a layer computes from x, by name."""
    x = x.detach().requires_grad_()
    outputs = layer(x)
    # The sum of the outputs, or of their squares, would hardly depend on x.
    outputs.pow(3).sum().backward()
    return {"outputs": outputs.detach(), "gradients of x": x.grad, **dict(layer.named_buffers())}


def compare_batch_norm(args, device):
    """On a rank: run a layer on its samples, and compare with PyTorch's layer on all samples."""
    torch.manual_seed(0)  # All ranks have the same samples.
    x = torch.randn(11, 3, 2, 2)
    layer = nn.BatchNorm2d(3, eps=0.01, momentum=0.3)
    layer.weight.data *= 2
    converted = copy.deepcopy(layer).to(device)
    ddp.convert_batch_norm(converted)

    expected = run_layer(layer, x)
    computed = run_layer(converted, share(x).to(device))

    for name, value in expected.items():
        if value.shape == x.shape:
            value = share(value)
        assert_close(computed[name], value, f"the {name} of rank {dist.get_rank()}")


class Lesson5BatchNorm(TestCase):
    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        for world_size in range(1, 5):
            run_job(world_size, train=compare_batch_norm)


# ---- Lesson 6: the number of processes, and stops (train)
# A job with augmentation, a warm-up, clipping and uneven labels ends with the parameters of a loop
# in plain PyTorch: on any number of processes, in micro-batches, with loader workers, and if it is
# stopped and goes on with another number of processes. To break it, leave out
# `optimizer.load_state_dict` in resume(). Then the net of the jobs that were stopped differs.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.2 --clip-grad-norm 0.3 --seed 5"


class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (torch.rand(()).item() + np.random.rand() + random.random()), y


def make_augmented_task(args, device):
    """Return a task. Its net has BatchNorm, unless micro-batches would change the result."""
    net = ddp.ConvNet() if args.local_bn or not args.micro_batch_size else plain_net()
    optimizer = torch.optim.SGD(net.to(device).parameters(), momentum=0.9, weight_decay=0.1)
    return Augmented(43), Ragged(10), net, optimizer


def warm_up(args, epochs_done):
    """Return the learning rate, which grows during the first epoch."""
    return args.lr * min(1, epochs_done + 0.1)


def plain_loop(args, device):
    """In place of train(), on one rank: train in plain PyTorch on the items of such a job."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, device)
    sampler = TorchSampler(train_set, seed=args.seed)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for begin in range(0, 36, 12):  # The last 7 of 43 samples do not fill a global batch.
            samples = []
            for index in order[begin : begin + 12]:
                ddp.seed_generators(args.seed, epoch, index)
                samples.append(train_set[index])
            x, y = default_collate(samples)
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = warm_up(args, epoch + begin / 43)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


class Lesson6NumberOfProcesses(TestCase):
    def test_on_any_number_of_processes_and_with_stops_a_job_ends_as_a_plain_loop_does(self):
        # A job makes 3 steps in each of 2 epochs: here 2 steps on 4 ranks, 2 on 3, and 2 on 2.
        stopped = [(4, 0.5), (3, 1.2), (2, None)]
        unstopped = [[(world_size, None)] for world_size in range(1, 5)]
        for option in ("--micro-batch-size 2", "--num-workers 2"):
            options = f"{OPTIONS} {option}"
            expected = net_after(options, (1, None), train=plain_loop)
            for runs in (stopped, *unstopped):
                net = net_after(options, *runs)
                assert_close(net, expected, f"the net of a job {options} with the runs {runs}")

    def test_on_two_processes_a_stopped_job_ends_with_the_bits_of_an_unstopped_one(self):
        expected = net_after(OPTIONS, (2, None))

        net = net_after(OPTIONS, (2, 0.5), (2, 1.2), (2, None))

        tolerance = 1e-3 if GPUS >= 2 else 0  # Whether GPUs give the same bits is untried.
        assert_close(net, expected, "the net", tolerance)


# ------------------------------------------------------------------------------------------------
# Above is what data-parallel training guarantees. Here are the helpers.
os.environ |= {
    "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or torchrun's restarts may hang
}
SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12"  # four steps an epoch


def be_rank(rank, world_size, port, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method("fork", force=True)  # So loader workers start fast.
    torch.set_num_threads(1)
    environ = f"RANK={rank} WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={world_size}"
    # LOCAL_RANK differs from RANK, as it does on a second machine.
    environ += f" LOCAL_RANK={world_size - 1 - rank}"
    # The ranks find each other by a store of the process that has started them.
    environ += f" MASTER_ADDR=localhost MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True"
    # TF32 rounds more than a CPU. Kineto, PyTorch's profiler, would print lines of its own.
    environ += " NVIDIA_TF32_OVERRIDE=0 KINETO_LOG_LEVEL=9"
    os.environ |= dict(variable.split("=") for variable in environ.split())
    vars(ddp).update(replacements)
    sys.argv = ["ddp_reference.py", *options.split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks: return what each rank printed.

    replacements: make_task=make_own_task puts make_own_task, which stands at the top level of a
    file, in the place of ddp_reference.make_task. If a rank raises, as by an assertion, the others
    are ended, and this function raises mp.ProcessRaisedException.
    """
    # The ranks are forked from a process that has imported what takes long. torch._dynamo is what
    # the first optimizer of a process would import.
    mp.set_forkserver_preload(["ddp_reference", "torch._dynamo"])
    # If TCPStore opened a port itself, it would listen on all networks.
    server = socket.create_server(("localhost", 0))
    port = server.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, master_listen_fd=server.detach())
    arguments = world_size, store.port, options, replacements
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [pathlib.Path(f"rank{rank}").read_text() for rank in range(world_size)]


def stop_at(epochs, args, epochs_done):
    """In place of learning_rate(): warm up, and end as by a kill when so many epochs are done."""
    if epochs and epochs_done >= epochs:
        os._exit(0)
    return warm_up(args, epochs_done)


def net_after(options, *runs, make_task=make_augmented_task, train=ddp.train):
    """Run a job in one or more runs (world_size, epochs until it is stopped): return its net."""
    path = f"{tempfile.mkdtemp(dir='.')}/ck"
    for world_size, epochs in runs:
        rate = partial(stop_at, epochs)
        job = {"learning_rate": rate, "make_task": make_task, "train": train}
        run_job(world_size, f"{options} --checkpoint {path} --checkpoint-every 1", **job)
    return torch.load(path, map_location="cpu")["net"]


def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        check_device=False,
        msg=lambda difference: f"{what} is wrong: {difference}",
    )


# ---- Chapter 2: the sampler
class Chapter2Sampler(TestCase):
    def test_an_order_takes_less_memory_than_a_list(self):
        tracemalloc.start()  # It sees a list, which would take 36 MB, but not a tensor.
        next(iter(ddp.DistributedSampler(range(10**6), 1, 0)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert peak < 10**5


# ---- Chapters 3 and 4: the step and the loop
def train_and_print_operators(args, device, train=ddp.train):
    """In place of train(): also print the names of all operators that PyTorch calls."""
    with torch.profiler.profile() as profile:
        train(args, device)
    print([event.name for event in profile.events()])


def print_random_number(output, y, batch_sums=ddp.batch_sums):
    """In place of batch_sums(): in training print a number as dropout would draw it.

    The type of the output tells whether the net ran under --amp.
    """
    if output.requires_grad:
        print(output.dtype, "drawn", torch.rand(1, device=y.device).item())
    return batch_sums(output, y)


def make_plain_task(args, device):
    """Return a task with uneven labels, whose net is the same in training and in evaluation."""
    net = plain_net().to(device)
    return Ragged(48), Ragged(25), net, torch.optim.Adam(net.parameters())


class Clock:
    """In place of the module time: a clock that is two seconds later at each look."""

    perf_counter = itertools.count(0, 2).__next__


class Chapter4Loop(TestCase):
    def test_a_step_calls_two_collectives_and_never_item(self):
        options = "--epochs 1 --local-bn --micro-batch-size 2 --num-workers 1 --clip-grad-norm 1"
        # 43 samples are 7 steps of 6, or 3 of 12. A worker reads them, because reading calls
        # .item(). So does Adam on a CPU, hence this task, which has SGD.
        replacements = {"train": train_and_print_operators, "make_task": make_augmented_task}
        of_7_steps, _ = run_job(2, f"{options} --global-batch-size 6", **replacements)
        of_3_steps, _ = run_job(2, f"{options} --global-batch-size 12", **replacements)

        for operator, count in (("c10d::", 2), ("aten::item", 0)):
            added = of_7_steps.count(operator) - of_3_steps.count(operator)
            assert added == 4 * count, f"four steps more call {operator} {added} times"

    def test_ranks_steps_and_micro_batches_draw_random_numbers_of_their_own(self):
        # A worker reads the items, because reading seeds the generators of its process.
        options = f"{SMALL} --micro-batch-size 3 --num-workers 1 --amp"
        ranks = run_job(2, options, batch_sums=print_random_number)

        drawn = re.findall(r"torch.bfloat16 drawn \S+", "".join(ranks))
        different = len(set(drawn))
        assert different == 32, f"{different} numbers on 2 ranks, in 8 steps of 2 micro-batches"

    def test_all_printed_numbers_are_those_of_the_job_also_after_a_stop(self):
        # With a learning rate of 0 the net stays what it is, and its numbers are known.
        loss, accuracy = loss_and_accuracy(plain_net(), Ragged(48))
        val_loss, val_accuracy = loss_and_accuracy(plain_net(), Ragged(25))
        means = f"loss {loss:.4f} accuracy {accuracy:.4f}"
        means += f" | val_loss {val_loss:.4f} val_accuracy {val_accuracy:.4f}"
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint numbers --checkpoint-every 2"
        replacements = {"make_task": make_plain_task, "time": Clock}
        run_job(3, options, **replacements, learning_rate=partial(stop_at, 0.7))

        printed = "".join(run_job(3, options, **replacements))  # Only rank 0 prints.

        # Between two looks at the clock, 24 samples are read after the stop, and then 48.
        expected = f"""
resuming from numbers: epoch 0, 24 samples read
epoch 0 | 48/48 samples | loss {loss:.4f}
epoch 0 | {means} | 12.0 samples/s
epoch 1 | 48/48 samples | loss {loss:.4f}
epoch 1 | {means} | 24.0 samples/s
"""
        assert printed.endswith(expected), f"{printed}\nshould end with{expected}"
        # The next epoch begins with a resume, too.
        assert f"epoch 2 | {means}" in run_job(3, f"{options} --epochs 3", **replacements)[0]


# ---- Chapter 5: the processes
def start(command):
    """Start a Python program, with its output in pipes."""
    # In a job of the shell, started with &, Ctrl-C is ignored. The program would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(
        [sys.executable, *command.split()],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    unittest.addModuleCleanup(program.terminate)  # in case no test has waited for its end
    return program


def finish(program, status=0):
    """Return (stdout, stderr) of a program when all processes that hold its pipes have ended."""
    out, err = program.communicate(timeout=120)
    assert program.returncode == status, f"status {program.returncode}: {err}"
    return out, err


class Chapter5Processes(TestCase):
    @classmethod
    def setUpClass(cls):
        # These programs run side by side.
        cls.main_job = start("-m ddp_reference --length 300")
        cls.failing = start("-m ddp_reference --nproc-per-node 1 --shards none --val-shards none")

    def test_what_cannot_work_is_refused_in_one_line_with_status_2(self):
        def refuse(words, options="", **environ):
            sys.argv = ["ddp_reference.py", *options.split()]
            with (
                mock.patch.dict(os.environ, environ),
                contextlib.redirect_stderr(io.StringIO()) as err,
                self.assertRaisesRegex(SystemExit, "2"),
            ):
                ddp.main()
            self.assertRegex(err.getvalue(), f"^.*: error: .*{words}.*\n$")

        refuse("equal shares need 238 or 245", "--nproc-per-node 7")
        refuse("equal shares need 2 or 4", "--nproc-per-node 2 --global-batch-size 0")
        refuse("--shards and --val-shards go together", "--shards a.tar")
        refuse("--checkpoint-every needs --checkpoint", "--checkpoint-every 1")
        refuse("--checkpoint is a folder", "--checkpoint=")
        refuse("its folder is missing", "--checkpoint none/ck")
        refuse("torchrun", RANK="0")
        refuse("torchrun", SLURM_STEP_NUM_TASKS="2")

    def test_the_main_job_learns(self):
        out, err = finish(self.main_job)

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        first = rf"ddp on {kind}, global batch size 240, torch .*\n"
        self.assertRegex(out, rf"{first}(epoch .*\n){{6}}$")
        self.assertRegex(out, r"epoch 5 .* val_accuracy 0\.9")  # Guessing would have 0.333.
        assert "set_epoch" not in err  # The sampler warns of a second pass only.

    def test_a_rank_that_raises_ends_the_job_with_its_message(self):
        _, err = finish(self.failing, status=1)

        self.assertRegex(err, r"FileNotFoundError: .* No such file or directory: 'none'\s*$")


# ---- Chapter 6: checkpoints
def train_with_a_file_of_rank_0(args, device, train=ddp.train):
    """In place of train(): only rank 0 finds the checkpoint."""
    if dist.get_rank():
        args.checkpoint = "none"
    train(args, device)


class Chapter6Checkpoints(TestCase):
    def test_a_job_that_cannot_go_on_or_save_leaves_the_checkpoint_as_it_was(self):
        path = pathlib.Path("ck")
        run_job(1, f"{SMALL} --checkpoint ck")
        whole = path.read_bytes()
        os.symlink("/dev/full", f"{path}.tmp")  # No byte can be written to it.

        def refuse(words, options="", content=whole, **replacements):
            path.write_bytes(content)
            with self.assertRaisesRegex(mp.ProcessRaisedException, words):
                run_job(2, f"{SMALL} --checkpoint ck {options}", **replacements)
            assert path.read_bytes() == content, words

        refuse("ck is damaged or of another job: RuntimeError", content=whole[:1000])
        refuse("ck is damaged or of another job: UnpicklingError", content=pickle.dumps(print, 2))
        refuse("args.seed=0", "--seed 99")
        refuse(r"len\(train_set\)=48", "--num-samples 60")
        refuse("batch_size=12", "--global-batch-size 24")
        refuse("Adam", make_task=make_augmented_task)
        refuse("Missing key", make_task=make_plain_task)
        refuse("not all ranks have found", train=train_with_a_file_of_rank_0)
        refuse("a parameter is not finite, so .*ck was not written", "--epochs 3 --lr inf")
        refuse("No space left|PytorchStreamWriter failed", "--epochs 3")
        refuse("larger than the training set", "--num-samples 6")


# ---- Chapter 9: hangs, and processes that are left over
TORCHRUN = "--standalone --local-addr=127.0.0.1 --nproc-per-node=2 --max-restarts=1"
PROGRAM = """
import os, signal
import torch._dynamo  # PyTorch would import this in the first step, which would take seconds.
import ddp_reference as ddp

def sleep_once(args, epochs_done):
    restarts, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if epochs_done > 1.3 and restarts == "0" and rank == "0":
        print("listening on", os.environ["GLOO_SOCKET_IFNAME"])
        signal.pause()
    return args.lr

ddp.learning_rate = sleep_once
ddp.main()
"""


class Chapter9Hangs(TestCase):
    @classmethod
    def setUpClass(cls):
        pathlib.Path("sleeper.py").write_text(PROGRAM)
        job = f"sleeper.py {SMALL} --timeout 5 --checkpoint sleeper --checkpoint-every 1"
        cls.sleeper = start(f"-m torch.distributed.run {TORCHRUN} {job}")

    def test_ranks_and_loader_workers_end_when_the_launcher_alone_is_ended(self):
        endless = f"{SMALL} --epochs 9999 --log-every 1 --nproc-per-node 1 --num-workers 1"
        for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
            launcher = start(f"-m ddp_reference {endless}")
            while not launcher.stdout.readline().startswith("epoch"):
                assert launcher.poll() is None

            launcher.send_signal(number)

            finish(launcher, status)

    def test_when_a_rank_hangs_all_ranks_print_stacks_and_end_and_torchrun_restarts_the_job(self):
        out, err = finish(self.sleeper)

        first, second = err.split("Timeout (")[1:]  # watched() has rank 1 of 2 wait 2.5 s more.
        self.assertRegex(first, r"^0:00:05\)!\n(?s:.*) in sleep_once\n")
        self.assertRegex(second, r"^0:00:07\.500000\)!\n(?s:.*) in train_step\n")
        assert "listening on lo" in out
        assert "resuming from sleeper: epoch 1, 24 samples read" in out


# ---- Chapter 10: tar shards
def write_shard(path, members):
    """Write arrays into a tar file, under these names."""
    with tarfile.open(path, "w") as tar:
        for name, array in members.items():
            np.save("member.npy", array)
            tar.add("member.npy", name)


class Chapter10Shards(TestCase):
    def test_training_from_shards_is_training_from_their_samples(self):
        dataset = ddp.SyntheticDataset(48, 64, seed=0)
        for path, indices in (("0.tar", range(24)), ("1.tar", range(24, 48))):
            members = {}  # Names of more than 100 characters need a header of their own.
            for index in indices:
                x, y = dataset[index]
                members[f"{'long/' * 30}v1.0/{index}.y.npy"] = y
                members[f"{'long/' * 30}v1.0/{index}.x.npy"] = x
            write_shard(path, members)

        shards = f"{SMALL} --shards 0.tar 1.tar --val-shards 0.tar"
        net = net_after(shards, (2, None), make_task=ddp.make_task)

        assert_close(net, net_after(SMALL, (2, None), make_task=ddp.make_task), "the net")

    def test_a_damaged_shard_is_refused_by_its_name_and_nothing_is_unpickled(self):
        path = pathlib.Path("a.tar")
        write_shard(path, {"a.y.npy": 0, "a.x.npy": np.array([{}])})
        with self.assertRaisesRegex(ValueError, "Object arrays cannot be loaded"):
            ddp.ShardDataset([path])[0]

        whole = path.read_bytes()
        write_shard(path, {"a.x.npy": 0})
        # One file lacks y. The other one ends where a member ends, so tarfile sees no damage.
        for content in (path.read_bytes(), whole[:2048]):
            path.write_bytes(content)
            with self.assertRaisesRegex(ValueError, "a.tar is damaged or lacks a member"):
                ddp.ShardDataset([path])


# ---- The README: what it shows is run
def programs():
    """Return the programs of the README by name. A diff makes one from another one."""
    texts = dict(re.findall(r"(?ms)^```python (\S+)\n(.*?)^```", README))
    texts["ddp_reference.py"] = (HERE / "ddp_reference.py").read_text()
    for old_name, name, diff in re.findall(r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README):
        text = texts[old_name]
        for hunk in re.split(r"(?m)^@@.*\n", diff):
            old = "".join(re.findall(r"(?m)^[ -](.*\n)", hunk))
            new = "".join(re.findall(r"(?m)^[ +](.*\n)", hunk))
            assert old in text, f"The README's diff shows other lines:\n{old}"
            text = text.replace(old, new)
        texts[name] = text
    return texts


def write_programs():
    """Write the programs of the README into this folder, but not over a file that exists."""
    for name, text in programs().items():
        if os.path.exists(name):
            print(f"{name} exists already, and is left as it is")
        elif name != "exercises":
            pathlib.Path(name).write_text(text)
            print(f"wrote {name}")


def run_program(name):
    """In place of main(): run a program of the README."""
    if int(os.environ["WORLD_SIZE"]) > GPUS:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The ranks need a GPU each.
    exec(programs()[name], {"__name__": "__main__"})


class TheReadme(TestCase):
    def test_its_programs_print_the_same_numbers_on_one_and_on_two_processes(self):
        def numbers(name, world_size):
            out, *_ = run_job(world_size, "--epochs 3 --lr 0.1", main=partial(run_program, name))
            assert "epoch 2 |" in out, f"{name} ends too early: {out}"
            return re.findall(r"epoch .* 0\.\d{4}", out)

        expected = numbers("one.py", 1)
        for name, world_size in (("dp.py", 1), ("many.py", 2), ("better.py", 2)):
            self.assertEqual(numbers(name, world_size), expected, name)
        self.assertEqual(numbers("my_job.py", 2), numbers("my_job.py", 1))


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`, or do what is named."""
    if sys.argv[1:] == ["programs"]:
        return write_programs()
    if sys.argv[1:] == ["experiments"]:
        print(f"PyTorch's sampler{experiments(TorchSampler)}")
        return print(f"Ours{experiments(ddp.DistributedSampler)}")
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures + result.errors)
    print(f"{result.testsRun - failed} passed, {failed} failed, {len(result.skipped)} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # NAME in -k NAME may be mistyped.


if __name__ == "__main__":
    main()
