"""Arguments that are not plain tensors: FX proxies, __torch_function__, wrong types."""

import copy
import inspect
import pickle

import numpy
import pytest
import torch
from samples import DIFFERENTIABLE, as_tuple, leaves, named
from torch.fx import symbolic_trace
from torch.overrides import TorchFunctionMode

import my_ops


def calls():
    """For each public function: its tensors by name, and its other arguments."""
    parameters = {"weights": torch.randn(9, 5), "bias": torch.randn(9)}
    h, c = torch.randn(2, 4, 3)
    sequence = torch.randn(3, 4, 2)
    masks = {"lengths": torch.tensor([0, 1, 2, 3]), "reset": torch.rand(3, 4) < 0.5}
    masks["zoneout"] = torch.rand(3, 4, 3)

    def of_torch(gates):
        rows = 3 * gates
        shapes = {"weight_ih": (rows, 2), "weight_hh": (rows, 3), "bias_ih": rows, "bias_hh": rows}
        return {name: torch.randn(shape) for name, shape in shapes.items()}

    return {
        "add_one": ({"x": torch.randn(3)}, {}),
        "custom_add": ({"a": torch.randn(3), "b": torch.randn(2, 1)}, {}),
        "d_sigmoid": ({"z": torch.randn(3)}, {}),
        "round_ste": ({"x": torch.randn(3)}, {}),
        "gemm": ({"a": torch.randn(2, 3), "b": torch.randn(3, 4)}, {"precision": "high"}),
        "gemm-out": (
            {"a": torch.randn(2, 3), "b": torch.randn(3, 4), "out": torch.zeros(2, 4)},
            {},
        ),
        "linear": (
            {
                "x": torch.randn(2, 3),
                "weight": torch.randn(4, 3),
                "bias": torch.randn(4),
                "residual": torch.randn(2, 4),
            },
            {"activation": "gelu", "precision": "highest"},
        ),
        "attention": (
            {
                "query": torch.randn(2, 3, 5, 4),
                "key": torch.randn(2, 3, 6, 4),
                "value": torch.randn(2, 3, 6, 4),
                "attn_mask": torch.randn(5, 6),
            },
            {"scale": 0.3},
        ),
        "lltm_cell": ({"input": torch.randn(4, 2), **parameters, "old_h": h, "old_cell": c}, {}),
        "lltm": ({"input": sequence, "h0": h, "c0": c, **parameters, **masks}, {}),
        "lstm_cell": ({"input": sequence[0], **of_torch(4), "old_h": h, "old_cell": c}, {}),
        "lstm": ({"input": sequence, "h0": h, "c0": c, **of_torch(4), **masks}, {}),
        "gru_cell": ({"input": sequence[0], **of_torch(3), "old_h": h}, {}),
        "gru": ({"input": sequence, "h0": h, **of_torch(3), **masks}, {}),
        "prepack": ({"weight": torch.randn(4, 3)}, {}),
    }


NAMES = list(calls())
PLACES = [(name, place) for name, (tensors, _) in calls().items() for place in tensors]


def public(name):
    return getattr(my_ops, name.partition("-")[0])


def call(name, tensors, options):
    """Positional arguments where that is allowed."""
    function = public(name)
    kinds = inspect.signature(function).parameters
    positional = [t for n, t in tensors.items() if kinds[n].kind != inspect.Parameter.KEYWORD_ONLY]
    keywords = {n: t for n, t in tensors.items() if kinds[n].kind == inspect.Parameter.KEYWORD_ONLY}
    return function(*positional, **keywords, **options)


def assert_equal(got, want):
    for ours, exact in zip(as_tuple(got), as_tuple(want), strict=True):
        assert torch.equal(ours, exact)


# --------------------------------------------------------------------------- __torch_function__


class Duck:
    """Not a tensor, but it defines what a function does with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        bound = inspect.signature(function).bind(*args, **(kwargs or {}))
        return function, types, dict(bound.arguments)


@pytest.mark.parametrize("name, place", PLACES)
def test_a_duck_gets_the_public_function_and_all_arguments(name, place):
    tensors, options = calls()[name]
    duck = Duck()
    function, types, arguments = call(name, {**tensors, place: duck}, options)
    assert function is public(name)
    assert Duck in types
    assert arguments.pop(place) is duck
    for given, value in {**tensors, **options}.items():
        assert given == place or arguments.pop(given) is value
    left_out = inspect.signature(function).parameters
    assert all(value is left_out[name].default for name, value in arguments.items())


def test_a_duck_as_a_size():
    function, _, arguments = my_ops.fill_index(Duck(), 3, dtype=torch.int32)
    assert function is my_ops.fill_index
    assert (arguments["width"], arguments["dtype"]) == (3, torch.int32)


class Watching(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_mode_sees_the_public_function(name):
    tensors, options = calls()[name]
    with Watching() as mode:
        call(name, tensors, options)
    assert mode.seen[0] is public(name)


SEEN = []


class Seen(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(**named([op for op in DIFFERENTIABLE if op.call is not op.overload]))
def test_a_subclass_sees_the_public_function_and_has_gradients(op, device):
    plain = leaves(op.tensors(2, torch.float64, device))
    tensors = tuple(t.detach().as_subclass(Seen).requires_grad_() for t in plain)
    SEEN.clear()
    results, want = op(*tensors), op(*plain)
    assert getattr(my_ops, op.name.partition("-")[0]) in SEEN
    assert all(type(r) is Seen for r in results)
    assert_equal(tuple(r.as_subclass(torch.Tensor) for r in results), want)
    ones = [torch.ones_like(r) for r in want]
    got = torch.autograd.grad(results, tensors, [t.as_subclass(Seen) for t in ones])
    for ours, exact in zip(got, torch.autograd.grad(want, plain, ones), strict=True):
        assert torch.equal(ours.as_subclass(torch.Tensor), exact)


def test_the_default_device_is_that_of_the_mode():
    with torch.device("meta"):
        assert my_ops.fill_index(2, 3).device.type == "meta"
    with Watching(), torch.device("meta"):
        assert my_ops.fill_index(2, 3).device.type == "meta"


class Own(torch.nn.Parameter):
    """A parameter from a library that adds attributes, but no behaviour."""


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_a_subclass_of_parameter_is_a_tensor(op, device):
    plain = leaves(op.tensors(2, torch.float64, device))
    own = tuple(Own(t.detach(), t.requires_grad) for t in plain)
    results = op(*own)
    assert_equal(results, op(*plain))
    ones = [torch.ones_like(r) for r in results]
    got = torch.autograd.grad(results, own, ones)
    assert_equal(got, torch.autograd.grad(op(*plain), plain, ones))


# --------------------------------------------------------------------------------------------- FX


def traced(name):
    """A function of all tensors of a call, as a graph."""
    tensors, options = calls()[name]
    names = ", ".join(tensors)
    scope = {"call": call, "options": options}
    keys = ", ".join(f"{n}={n}" for n in tensors)
    exec(f"def function({names}): return call({name!r}, dict({keys}), options)", scope)
    return symbolic_trace(scope["function"]), tensors, options


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prepack"])
def test_fx_traces_and_runs(name):
    graph, tensors, options = traced(name)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [public(name)]
    want = call(name, tensors, options)
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert_equal(module(*tensors.values()), want)


def test_fx_packed_weight_and_sizes():
    def function(x, weight):
        packed = my_ops.prepack(weight)
        index = my_ops.fill_index(x.shape[0], weight.shape[0])
        return my_ops.linear(x, packed, activation="relu") + index

    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    graph = symbolic_trace(function)
    assert torch.equal(graph(x, weight), function(x, weight))
    assert torch.equal(graph(x[:2], weight), function(x[:2], weight))


def test_fx_traces_layers():
    model = torch.nn.Sequential(
        my_ops.nn.LinearActivation(3, 4, activation="gelu"), my_ops.nn.RoundSTE()
    )
    graph, x = symbolic_trace(model), torch.randn(2, 3)
    assert torch.equal(graph(x), model(x))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [my_ops.linear, my_ops.round_ste]


# ------------------------------------------------------------------------------------ wrong types


WRONG = {
    "None": None,
    "list": [[1.0, 2.0]],
    "numpy": numpy.ones((2, 2), numpy.float32),
    "str": "tensor",
    "float": 1.0,
    "module": torch.nn.Linear(2, 2),
}
OPTIONAL = {("linear", "bias"), ("linear", "residual"), ("gemm-out", "out")}
OPTIONAL |= {("attention", "attn_mask")}
OPTIONAL |= {
    (name, mask) for name in ("lltm", "lstm", "gru") for mask in ("lengths", "reset", "zoneout")
}
OPTIONAL |= {
    (name, bias)
    for name in ("lstm_cell", "lstm", "gru_cell", "gru")
    for bias in ("bias_ih", "bias_hh")
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name, place", PLACES)
def test_wrong_types_are_named(name, place, wrong):
    tensors, options = calls()[name]
    if wrong == "None" and (name, place) in OPTIONAL:
        return
    value = WRONG[wrong]
    function, kind = public(name).__name__, type(value).__name__
    with pytest.raises(TypeError, match=rf"^{function}: {place} must be a torch\.Tensor.*{kind}"):
        call(name, {**tensors, place: value}, options)


@pytest.mark.parametrize("wrong", [1, ["high"], numpy.ones(2), torch.ones(2), b"relu"])
@pytest.mark.parametrize(
    "name, option", [("gemm", "precision"), ("linear", "precision"), ("linear", "activation")]
)
def test_wrong_options_are_named(name, option, wrong):
    tensors, options = calls()[name]
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"^{name}: {option} must be a str or None, got {kind}"):
        call(name, tensors, {**options, option: wrong})


@pytest.mark.parametrize("device", [1.5, ["cpu"], torch.float32])
def test_fill_index_of_a_wrong_device(device):
    with pytest.raises(TypeError, match=r"^fill_index: device must be .* got (float|list|dtype)$"):
        my_ops.fill_index(2, 3, device=device)


# ------------------------------------------------------------------------ tensors of other kinds


def of_another_kind(kind, like):
    if kind in ("jagged", "strided"):
        parts = [like, like[:1]]
        return torch.nested.nested_tensor(parts, layout=getattr(torch, kind))
    if kind == "quantized":
        return torch.quantize_per_tensor(like, 0.1, 0, torch.qint8)
    return getattr(like, f"to_{kind}")()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about prototypes
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    "kind, said",
    [
        ("jagged", "must not be nested"),
        ("strided", "must not be nested"),
        ("sparse", "must be a dense tensor .* got torch.sparse_coo"),
        ("sparse_csr", "must be a dense tensor .* got torch.sparse_csr"),
        ("mkldnn", "must be a dense tensor .* got torch._mkldnn"),
        ("quantized", "must be a dense tensor .* got torch.qint8"),
    ],
)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "attention"]
)  # torch's takes some
def test_nested_sparse_and_quantized_tensors_are_named(name, kind, said, gradient):
    tensors, options = calls()[name]
    place = next(iter(tensors))
    other = of_another_kind(kind, torch.randn(2, 3))
    other.requires_grad_(gradient and kind != "quantized" and name != "gemm-out")
    function = public(name).__name__
    with pytest.raises(NotImplementedError, match=f"^{function}: {place} {said}"):
        call(name, {**tensors, place: other}, options)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about prototypes
@pytest.mark.parametrize("kind", ["jagged", "strided", "sparse", "sparse_csr", "mkldnn"])
@pytest.mark.parametrize(
    "name", [f"{cell}{kind}" for kind in ("", "Cell") for cell in ("LSTM", "GRU", "RNN", "LLTM")]
)
def test_recurrent_layers_name_inputs_of_other_kinds(name, kind):
    input = of_another_kind(kind, torch.randn(2, 3))
    with pytest.raises(
        NotImplementedError, match=f"^{name}: input must (not be nested|be a dense)"
    ):
        getattr(my_ops.nn, name)(3, 4)(input)


@pytest.mark.slow
def test_a_dtensor_without_the_sharding_rules_is_told_of_them(run_python):
    script = """
        import torch, my_ops, torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(2, 3), mesh)
        calls = [
            lambda x: my_ops.d_sigmoid(x),
            lambda x: torch.ops.my_ops.d_sigmoid(x),
            lambda x: my_ops.d_sigmoid(x.detach().requires_grad_()),
        ]
        for call in calls:
            try:
                call(x)
            except NotImplementedError as error:
                print(error)
        import my_ops.distributed
        for call in calls:
            print(torch.equal(call(x).full_tensor(), my_ops.d_sigmoid(x.to_local())))
        dist.destroy_process_group()
    """
    lines = [line for line in run_python(script).splitlines() if not line.startswith("[Gloo]")]
    *told, first, second, third = lines
    hint = (
        "d_sigmoid: z is a DTensor: import my_ops.distributed first, which has the sharding rules"
    )
    assert told == [hint] * 3
    assert (first, second, third) == ("True",) * 3


@pytest.mark.parametrize("negative", [("a",), ("out",), ("a", "b", "out")])
def test_gemm_of_views_that_stand_for_their_negative(negative, device):
    plain = {"a": torch.randn(2, 3), "b": torch.randn(3, 4), "out": torch.randn(2, 4)}
    tensors = {n: t.to(device) for n, t in plain.items()}
    for name in negative:  # the imaginary part of a conjugate
        tensors[name] = torch.complex(tensors[name], -tensors[name]).conj().imag
        assert tensors[name].is_neg()
    want = torch.mm(tensors["a"], tensors["b"])
    out, version = tensors["out"], tensors["out"]._version
    assert my_ops.gemm(**tensors) is out
    assert out._version > version
    torch.testing.assert_close(out, want)


def test_out_with_a_tangent_is_refused(device, rejects):
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    out = torch.zeros(2, 4, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with rejects(RuntimeError, "gemm: out= does not support .* has a tangent", out):
            my_ops.gemm(dual, b, out=out)


@pytest.mark.parametrize("name", NAMES)
def test_inference_tensors(name, device):
    with torch.inference_mode():
        tensors, options = calls()[name]
        tensors = {n: t.to(device) for n, t in tensors.items()}
        inside = call(name, tensors, options)
    if name == "prepack":
        inside.current()
        return
    if name == "gemm-out":  # like torch.mm
        with pytest.raises(RuntimeError, match=r"^gemm: out must not be an inference tensor"):
            call(name, tensors, options)
        return
    outside = call(name, tensors, options)
    assert_equal(outside, inside)
    assert all(r.is_inference() for r in as_tuple(inside))
    assert not any(r.is_inference() for r in as_tuple(outside))


@pytest.mark.slow
def test_prepack_in_a_compiled_function(device):
    def function(x, weight):
        return my_ops.linear(x, my_ops.prepack(weight), activation="silu")

    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), function(x, weight))
    packed = torch.compile(my_ops.prepack, fullgraph=True, backend="aot_eager")(weight)
    weight.zero_()
    assert torch.equal(my_ops.linear(x, packed), torch.zeros(2, 4, device=device))
