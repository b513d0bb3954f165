"""Which device serves, what its formats are, and what a communicator on the CPU has of what GPUs have."""

import os
import re
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

import moecomm
from moecomm.backends.opened import shared_tensor
from moecomm.backends.order import ProcessLock
from moecomm.setup import discovery
from moecomm.setup.checks import check_formats
from tests.unit.loopback import IDS_TK, SIZES


def test_bad_formats() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    check_formats(cpu, 7, torch.float64)
    check_formats(cuda, 32, torch.float32, combine_wire="fp8", gradient_wire="mxfp8")
    for device, hidden, name, wire, error, words in (
        (cpu, 16, "gradient_wire", "fp8", moecomm.Unsupported, "gradients travel in their own dtype"),
        (cuda, 32, "wire", "nvfp4", moecomm.Unsupported, "None .* and 'fp8' and 'mxfp8'"),
        (cuda, 24, "gradient_wire", "fp8", moecomm.InvalidArgument, "with gradient_wire='fp8'"),
        (cpu, 16, "combine_wire", "fp8", moecomm.Unsupported, "on the cpu sums travel in their own"),
        (cuda, 16, "combine_wire", "mxfp8", moecomm.Unsupported, "this version has None"),
        (cuda, 24, "combine_wire", "fp8", moecomm.InvalidArgument, "a multiple of 16"),
    ):
        with pytest.raises(error, match=words):
            check_formats(device, hidden, torch.float32, **{name: wire})
    text = r"dtype is torch\.float64 on cuda:1, .*: use float32 there, or device='cpu'"
    with pytest.raises(moecomm.Unsupported, match=text):
        check_formats(torch.device("cuda", 1), 16, torch.float64)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)])
def test_a_gpu_without_kernels_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the CPU is not chosen instead of it."""
    devices = moecomm.setup.devices
    monkeypatch.setattr(devices, "_C", SimpleNamespace(cuda_version="13.0", DeviceCommunicator=object))
    monkeypatch.setattr(discovery, "_C", SimpleNamespace(cuda_version="13.0", fabric_missing=lambda: None))
    monkeypatch.setattr(devices, "_has_driver_bindings", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if capability[0] in (9, 10):
        assert devices.why_no_cuda() is None and not list(discovery.left_out())
        return
    reason = re.escape("the GPU has compute capability {}.{}, 9.0 or 10.x is needed".format(*capability))
    with pytest.raises(moecomm.Unsupported, match=f"device is cuda, this version serves cpu here: {reason}"):
        devices.choose_device("cuda")
    with pytest.raises(moecomm.Unsupported, match=rf"device is None, .*: {reason}.*pass device='cpu'"):
        devices.choose_device(None)
    assert devices.choose_device("cpu") == torch.device("cpu")
    assert [re.match(f"GPUs: left out, {reason}", line) is not None for line in discovery.left_out()] == [
        True
    ]


def test_cuda_is_offered_only_where_it_works() -> None:
    reason = moecomm.setup.devices.why_no_cuda()
    assert moecomm.available_devices() == (("cuda", "cpu") if reason is None else ("cpu",))
    if reason is not None:
        with pytest.raises(moecomm.Unsupported) as caught:
            moecomm.Communicator(**SIZES, device="cuda")
        assert reason in str(caught.value)
        with moecomm.Communicator(**SIZES) as comm:
            assert comm.device.type == "cpu" and comm.stream is None


def test_device_names_that_are_none() -> None:
    with pytest.raises(moecomm.InvalidArgument, match="device is 'gpu'"):
        moecomm.Communicator(**SIZES, device="gpu")


def test_arrays_share_their_memory() -> None:
    cpu = torch.device("cpu")
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    tensor = shared_tensor(array, cpu)
    array[0, 0] = 7
    assert isinstance(tensor, torch.Tensor) and tensor[0, 0] == 7
    assert shared_tensor(tensor, cpu) is tensor
    for useless in ([1, 2], None, numpy.array(["text"])):
        assert shared_tensor(useless, cpu) is useless


def test_numpy_in_a_cpu_communicator() -> None:
    numpy = pytest.importorskip("numpy")
    with moecomm.Communicator(**SIZES, device="cpu") as comm:
        x_TH = numpy.random.default_rng(0).random((5, 8), dtype=numpy.float32)
        out = comm.dispatch(x_TH, IDS_TK.numpy())
        y_TH = numpy.from_dlpack(comm.combine(numpy.from_dlpack(out.tokens), out.handle))
        numpy.testing.assert_allclose(y_TH, x_TH * (IDS_TK.numpy() >= 0).sum(1, keepdims=True), rtol=1e-6)
        with pytest.raises(moecomm.InvalidArgument, match="x is list, expected a torch"):
            comm.dispatch([[1.0]], IDS_TK)


def test_a_thread_that_is_left_behind_by_a_cpu_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = moecomm.Communicator(**SIZES, device="cpu")
    native = comm._backend._native  # type: ignore[union-attr]
    closes = SimpleNamespace(close=lambda: native.close() and False)
    monkeypatch.setattr(comm._backend, "_native", closes)
    with pytest.warns(RuntimeWarning, match="has left it behind"):
        comm.close()


def test_a_cpu_communicator_has_no_phases() -> None:
    with (
        moecomm.Communicator(**SIZES, device="cpu") as comm,
        pytest.raises(moecomm.Unsupported, match=r"last_phases\(\) is of CUDA"),
    ):
        comm.last_phases()


def test_a_forked_child_finds_the_lock_free() -> None:
    lock, held, done = ProcessLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # else it would wait for ever
        with lock, lock:
            os._exit(7)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        done.set()
        thread.join()
    with lock:
        pass
