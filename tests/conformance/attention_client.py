"""Attention through tritonclient, and the tolerances of the contract."""

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

DATATYPES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
    np.dtype(np.float16): "FP16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float32): "FP32",
    np.dtype(np.float64): "FP64",
}

# |got - want| <= t + t * |want|
TOLERANCES = {
    np.dtype(np.float64): 1e-12,
    np.dtype(np.float32): 2e-6,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 1.6e-2,
}


def to_input(name, array, protocol=triton):
    """`protocol`: a module of tritonclient."""
    tensor = protocol.InferInput(name, list(array.shape), DATATYPES[array.dtype])
    tensor.set_data_from_numpy(array)
    return tensor


def shared_inputs(arrays, name, protocol=triton):
    """Inputs in the named shared memory region, one array after another. `protocol`: a module of tritonclient."""
    inputs, offset = [], 0
    for tensor, array in arrays.items():
        inputs.append(protocol.InferInput(tensor, list(array.shape), DATATYPES[array.dtype]))
        inputs[-1].set_shared_memory(name, array.nbytes, offset)
        offset += array.nbytes
    return inputs


def check_shared_memory(client, arrays, source, sink):
    """Checks that inputs in the region "in" and Y in the region "out" give the same bits as raw contents."""
    offset = 4096
    want = attend(client, arrays, ["Y", "lse"])
    shm.set_shared_memory_region(source, list(arrays.values()))
    y, lse = triton.InferRequestedOutput("Y"), triton.InferRequestedOutput("lse")
    y.set_shared_memory("out", 1 << 19, offset)
    result = client.infer("attention", shared_inputs(arrays, "in"), outputs=[y, lse])
    got = shm.get_contents_as_numpy(sink, want["Y"].dtype, want["Y"].shape, offset)
    np.testing.assert_array_equal(got, want["Y"])
    np.testing.assert_array_equal(result.as_numpy("lse"), want["lse"])
    output = result.get_output("Y")
    assert output.parameters["shared_memory_region"].string_param == "out"
    assert output.parameters["shared_memory_byte_size"].int64_param == want["Y"].nbytes


def attend(client, inputs, outputs, parameters=None):
    """Computes attention over arrays by ONNX name. Inputs of None are not sent."""
    result = client.infer(
        "attention",
        [to_input(name, array) for name, array in inputs.items() if array is not None],
        outputs=[triton.InferRequestedOutput(name) for name in outputs],
        parameters=parameters,
    )
    returned = [output.name for output in result.get_response().outputs]
    assert returned == list(outputs), f"requested {list(outputs)}, got {returned}"
    return {name: result.as_numpy(name) for name in outputs}


def assert_close(name, got, want, *, slack=0.0):
    """Compares with the tolerance of got's type. NaN equals NaN, an infinity equals itself."""
    assert got.shape == want.shape, f"{name} has shape {got.shape}, want {want.shape}"
    tolerance = TOLERANCES[got.dtype]
    got = got.astype(np.float64)
    want = want.astype(np.float64)
    finite = np.isfinite(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        close = np.abs(got - want) <= tolerance + slack + tolerance * np.abs(want)
    good = np.where(finite, close, same)
    if not good.all():
        worst = tuple(int(i) for i in np.argwhere(~good)[0])
        raise AssertionError(
            f"{name}{list(worst)} is {got[worst]!r}, want {want[worst]!r} (tolerance {tolerance}); "
            f"{np.count_nonzero(~good)} of {good.size} elements are off"
        )
