# The C++ runtime as csrc/bindings/module.cpp exposes it. Addresses are integers; 0 is "absent".
from enum import Enum
from typing import SupportsIndex

cuda_version: str | None
compiler: str

def cpu_heuristics(local_ranks: int) -> str: ...
def shm_available_bytes() -> int: ...
def fabric_missing() -> str | None: ...
def fabric_version() -> str: ...
def fabric_offers() -> list[tuple[str, str, str, int, bool]]: ...
def window_sections(shape: WindowShape) -> list[tuple[str, int, int]]: ...
def window_bytes(shape: WindowShape) -> tuple[int, int]: ...

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2
    float64 = 3

class RowLayout(Enum):
    expert = 0
    rank = 1

class ErrorKind:
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    name: str

class WindowShape:
    def __init__(
        self, *, ranks: int, top_k: int, hidden: int, max_tokens: int, dtype: DType, ranks_per_node: int
    ) -> None: ...

class Plan:
    id: int
    rows: int
    needed_rows: int
    tokens: int
    layout: RowLayout
    expert_rows: list[int]
    offsets: list[int]
    by_expert: Plan | None

class HostBuffer:
    bytes: int
    def __buffer__(self, flags: SupportsIndex, /) -> memoryview: ...

class HostPool:
    def take(self, bytes: int) -> HostBuffer: ...

class Rail:
    endpoint_address: bytes
    endpoint: str

class Communicator:
    def __init__(
        self,
        *,
        shape: WindowShape,
        rank: int,
        num_experts: int,
        threads: int,
        timeout: float,
        host_ranks: int,
        first_epoch: int = 1,
        absence: float = 0.0,
    ) -> None: ...
    def link_window(self) -> str: ...
    def connect(self, names: list[str], pids: list[int]) -> None: ...
    def unlink_window(self) -> None: ...
    def open_rail(self, *, job: bytes, provider: str, interface: str, lanes: int, shuffle: int) -> Rail: ...
    def connect_rail(self, rail: Rail, endpoint_addresses: list[bytes], endpoints: list[str]) -> None: ...
    def network(self) -> str: ...
    def network_lanes(self) -> int: ...
    def begin_dispatch(
        self,
        *,
        x: int,
        ids: int,
        wide_ids: bool,
        weights: int,
        tokens: int,
        layout: RowLayout,
        alignment: int,
        capacity: int,
        positions: int,
        caller: int,
    ) -> Plan: ...
    def pull(self, *, out: int, weights: int, ids: int, index: int, index_weights: int) -> None: ...
    def redispatch(self, plan: Plan, *, rows: int, out: int, scales: int, other: int, dots: int) -> None: ...
    def combine(
        self, plan: Plan, *, rows: int, weights: int, y: int, weight_grads: int, out_weight_grads: int
    ) -> None: ...
    def fail(self, kind: ErrorKind, text: bytes) -> None: ...
    def check(self) -> None: ...
    def take_input(self, tokens: int) -> HostBuffer: ...
    def give_up(self) -> None: ...
    def close(self) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def reset_stats(self) -> None: ...

# -- the CUDA part: there if cuda_version is not None --

class WireFormat(Enum):
    same = 0
    fp8 = 1
    mxfp8 = 2
    nvfp4 = 3

class DeviceShape:
    def __init__(
        self,
        *,
        ranks: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: DType,
        wire: WireFormat,
        ranks_per_node: int,
        copies: bool = False,
        whole_sources: int = ...,
    ) -> None: ...

def device_window_sections(shape: DeviceShape) -> list[tuple[str, int, int]]: ...
def device_window_bytes(shape: DeviceShape) -> int: ...
def device_host_bytes(shape: DeviceShape) -> int: ...
def device_plan_fields(shape: DeviceShape) -> dict[str, tuple[int, int]]: ...

class DeviceCommunicator:
    num_sms: int
    def limit_sms(self, num_sms: int) -> None: ...
    def fuse_up_to(self, tokens: int) -> None: ...
    def __init__(
        self,
        *,
        shape: DeviceShape,
        rank: int,
        timeout: float,
        num_sms: int,
        device: int,
        host_ranks: int,
        first_epoch: int = 1,
        sums: WireFormat = ...,
        gradients: WireFormat = ...,
        absence: float = 0.0,
    ) -> None: ...
    def open_rail(self, *, job: bytes, provider: str, interface: str, lanes: int, shuffle: int) -> Rail: ...
    def connect_rail(self, rail: Rail, endpoint_addresses: list[bytes], endpoints: list[str]) -> None: ...
    def network(self) -> str: ...
    def network_lanes(self) -> int: ...
    def link_control(self) -> str: ...
    def unlink_control(self) -> None: ...
    def connect(self, bases: list[int], names: list[str], pids: list[int]) -> None: ...
    def dispatch(
        self,
        x: int,
        x_scales: int,
        ids: int,
        wide_ids: bool,
        weights: int,
        tokens: int,
        layout: RowLayout,
        alignment: int,
        capacity: int,
        positions: int,
        caller: int,
        plan: int,
        rows: int,
        out_positions: int,
        out: int,
        out_scales: int,
        out_weights: int,
        out_ids: int,
        out_index: int,
        out_index_weights: int,
        stream: int,
        /,
    ) -> None: ...
    def begin_dispatch(
        self,
        x: int,
        x_scales: int,
        ids: int,
        wide_ids: bool,
        weights: int,
        tokens: int,
        layout: RowLayout,
        alignment: int,
        capacity: int,
        positions: int,
        caller: int,
        plan: int,
        stream: int,
        /,
    ) -> None: ...
    def offered_rows(self, tokens: int, layout: RowLayout, alignment: int, /) -> tuple[int, int, bool]: ...
    def accept_rows(self) -> None: ...
    def wait_rows(self, stream: int, /) -> tuple[int, int]: ...
    def finish_dispatch(
        self,
        directly: bool,
        rows: int,
        positions: int,
        out: int,
        out_scales: int,
        out_weights: int,
        out_ids: int,
        out_index: int,
        out_index_weights: int,
        stream: int,
        /,
    ) -> None: ...
    def use_copies(self, copies: bool, held: bool) -> None: ...
    def complete(self, stream: int) -> bool: ...
    def copies_pay(self) -> bool: ...
    def redispatch(
        self,
        plan: int,
        layout: RowLayout,
        x: int,
        tokens: int,
        rows: int,
        out: int,
        scales: int,
        other: int,
        dots: int,
        quantised: bool,
        stream: int,
        /,
    ) -> None: ...
    def combine(
        self,
        plan: int,
        layout: RowLayout,
        rows: int,
        weights: int,
        tokens: int,
        y: int,
        weight_grads: int,
        out_weight_grads: int,
        quantised: bool,
        held: bool,
        stream: int,
        /,
    ) -> None: ...
    def splits(self, tokens: int) -> bool: ...
    def fail(self, kind: ErrorKind, text: bytes, stream: int) -> None: ...
    def stop_waiting(self) -> None: ...
    @property
    def interrupted(self) -> bool: ...
    def check(self) -> None: ...
    def close(self) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def phases(self) -> dict[str, dict[str, float]]: ...
    def reset_stats(self) -> None: ...

class Activation(Enum):
    swiglu = 0
    gelu = 1

def prepare_activation(dtype: DType) -> None: ...
def activation(
    inner: int,
    weights: int,
    ends: int,
    groups: int,
    rows: int,
    width: int,
    dtype: DType,
    activation: Activation,
    z: int,
    stream: int,
    /,
) -> None: ...
def activation_backward(
    inner: int,
    weights: int,
    ends: int,
    groups: int,
    rows: int,
    width: int,
    dtype: DType,
    activation: Activation,
    grad_z: int,
    grad_inner: int,
    grad_weights: int,
    z: int,
    stream: int,
    /,
) -> None: ...
def prepare_quantize(dtype: DType) -> None: ...
def quantize_rows(
    x: int,
    ends: int,
    groups: int,
    rows: int,
    columns: int,
    dtype: DType,
    values: int,
    scales: int,
    stream: int,
    /,
) -> None: ...
def quantize_columns(
    x: int,
    ends: int,
    groups: int,
    rows: int,
    columns: int,
    out_rows: int,
    dtype: DType,
    values: int,
    scales: int,
    padded_ends: int,
    stream: int,
    /,
) -> None: ...
