"""ONNX Runtime's Attention operator on one case."""

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

OPSET = 23
TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bool: TensorProto.BOOL}


def onnxruntime_version():
    return onnxruntime.__version__


def _model(tensors, causal):
    inputs = [helper.make_tensor_value_info(name, TYPES[t.dtype], t.shape) for name, t in tensors.items()]
    output = helper.make_tensor_value_info("Y", TYPES[tensors["Q"].dtype], tensors["Q"].shape)
    node = helper.make_node("Attention", list(tensors), ["Y"], is_causal=int(causal))
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


class OnnxAttention:
    """Calling it computes the case; ONNX Runtime allocates the output from its arena."""

    @classmethod
    def make(cls, case, tensors, threads):
        """None if ONNX Runtime has no CPU kernel."""
        named = {"Q": tensors.q, "K": tensors.k, "V": tensors.v}
        if tensors.mask is not None:
            mask = tensors.mask  # ONNX Runtime broadcasts the first two axes only.
            named["attn_mask"] = mask.expand(-1, -1, case.query_length, -1).contiguous()
        if any(tensor.dtype not in TYPES for tensor in named.values()):
            return None
        return cls(named, case.causal, threads)

    def __init__(self, tensors, causal, threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Its threads may spin while it runs, but not while the next side runs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        model = _model(tensors, causal)
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._tensors = tensors  # kept alive: the binding holds addresses
        for name, tensor in tensors.items():
            self._binding.bind_input(name, "cpu", 0, TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())

    def __call__(self):
        self._binding.bind_output("Y", "cpu")
        self._session.run_with_iobinding(self._binding)
