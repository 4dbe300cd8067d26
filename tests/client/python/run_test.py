"""Threads, fork and the kept plans."""

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import rapt


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


X = normal(1, 4, 64, 32)


@pytest.fixture(autouse=True)
def usual_threads():
    yield
    rapt.set_num_threads(len(os.sched_getaffinity(0)))


def test_the_default_is_the_processors_of_the_process():
    code = "import os, rapt; print(rapt.get_num_threads()); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code += "; print(rapt.get_num_threads())"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.split() == [str(len(os.sched_getaffinity(0))), "1"]


def threads_of_process():
    return len(os.listdir("/proc/self/task"))


def test_threads_start_and_end():
    rapt.set_num_threads(1)
    rapt.attention(X, X, X)
    alone = threads_of_process()
    rapt.set_num_threads(3)
    assert rapt.get_num_threads() == 3
    assert threads_of_process() == alone  # they start with the next call
    rapt.attention(X, X, X)
    assert threads_of_process() == alone + 2
    rapt.set_num_threads(1)
    assert threads_of_process() == alone


@pytest.mark.parametrize(("n", "error"), ((0, ValueError), (-1, ValueError), (1025, ValueError), (1.5, TypeError)))
def test_other_numbers_of_threads_are_an_error(n, error):
    with pytest.raises(error):
        rapt.set_num_threads(n)
    assert rapt.attention(X, X, X).shape == X.shape


def test_eight_threads_call_at_once():
    inputs = [normal(1, 2, 16 + n, 32) for n in range(8)]
    want = [rapt.attention(x, x, x, causal=True) for x in inputs]

    def work(n):
        return all(np.array_equal(rapt.attention(inputs[n], inputs[n], inputs[n], causal=True), want[n]) for _ in range(200))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_the_number_of_threads_changes_while_others_compute():
    want = rapt.attention(X, X, X)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            np.testing.assert_allclose(rapt.attention(X, X, X), want, atol=1e-6)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        try:
            for n in (1, 3, 2) * 10:
                rapt.set_num_threads(n)
        finally:
            stop.set()
        assert all(future.result() for future in futures)


def test_other_threads_run_python_during_a_call():
    """A call of about a second lets a counter of another thread proceed."""
    rapt.set_num_threads(1)
    x = normal(1, 8, 3000, 64)
    during, computing, done = [0], threading.Event(), threading.Event()

    def count():
        computing.wait()
        while not done.is_set():
            during[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    rapt.attention(x[:, :, :1], x, x)
    before = during[0]
    computing.set()
    rapt.attention(x, x, x)
    after = during[0]
    done.set()
    counter.join()
    assert after - before > 1000


def child_computes(queue):
    queue.put(rapt.attention(X, X, X, causal=True))


def compute_in_child():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=child_computes, args=(queue,))
    child.start()
    try:
        result = queue.get()
        child.join(60)
        return result, child.exitcode
    finally:
        child.kill()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("threads", (1, 2, 4))
def test_a_child_of_fork_computes(threads):
    rapt.set_num_threads(threads)
    want = rapt.attention(X, X, X, causal=True)
    result, code = compute_in_child()
    np.testing.assert_array_equal(result, want)
    assert code == 0
    np.testing.assert_array_equal(rapt.attention(X, X, X, causal=True), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_other_threads_compute_and_plan():
    want = rapt.attention(X, X, X, causal=True)
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            rapt.attention(X, X, X)

    def plan():
        length = 1
        while not stop.is_set():
            length = length % 3000 + 1
            rapt.attention(X[:, :, :1], X[:, :, :1], X[:, :, :1], softcap=length)

    others = [threading.Thread(target=work) for work in (compute, compute, plan)]
    for thread in others:
        thread.start()
    try:
        for _ in range(20):
            result, code = compute_in_child()
            np.testing.assert_array_equal(result, want)
            assert code == 0
    finally:
        stop.set()
        for thread in others:
            thread.join()


def test_more_plans_than_are_kept():
    x = X[:, :, :2]
    for n in range(1, 1200):
        rapt.attention(x, x, x, softcap=n)
    want = rapt.attention(x.astype(np.float64), x.astype(np.float64), x.astype(np.float64), softcap=1)
    np.testing.assert_allclose(rapt.attention(x, x, x, softcap=1), want, atol=1e-6)
