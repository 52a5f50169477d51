"""The programs that programs.py times. The models are those of torchaudio, torchvision,
transformers, torchdiffeq, timm and torch_geometric, as these packages ship them, or a few lines
over torch.nn. All have random weights and inputs of the sizes named, and no dropout, so that ways
can be compared. Without a GPU they are tiny."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda"
Loss = Callable[[nn.Module], Tensor]


class Program(NamedTuple):
    model: nn.Module
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None  # None: a step ends in backward


def size(full: Any, tiny: Any) -> Any:
    return full if FULL else tiny


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def error(result: Tensor) -> Tensor:
    """The mean squared error to a ramp along the last dimension."""
    return (result - torch.linspace(-1, 1, result.size(-1), device=DEVICE)).square().mean()


def integers(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape, device=DEVICE)


# ------------------------------------------------------------------------------------ transformers


def language_model(model: Any, batch: int, length: int) -> Program:
    text = integers(model.config.vocab_size, *size((batch, length), (2, 8)))
    return Program(model, lambda model: model(input_ids=text, labels=text).loss)


def bert() -> Program:
    """BERT-base, 16 x 512."""
    from transformers import BertConfig, BertForMaskedLM

    shape = size({}, {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    config = BertConfig(**shape, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return language_model(BertForMaskedLM(config), 16, 512)


def llama() -> Program:
    """300 million parameters, 4 x 1024."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, heads, inner, layers = size((1024, 16, 2816, 16), (16, 2, 32, 1))
    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        num_hidden_layers=layers,
        use_cache=False,
    )
    return language_model(LlamaForCausalLM(config), 4, 1024)


def gpt2() -> Program:
    """8 x 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = size({}, {"n_embd": 16, "n_head": 2, "n_layer": 1})
    config = GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return language_model(GPT2LMHeadModel(config), 8, 1024)


def vit() -> Program:
    """ViT-B/16, 64 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = size({}, {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    pixels = size(224, 32)
    model = ViTForImageClassification(ViTConfig(**shape, image_size=pixels, num_labels=1000))
    images, labels = noise(size(64, 2), 3, pixels, pixels), integers(1000, size(64, 2))
    return Program(
        model, lambda model: functional.cross_entropy(model(pixel_values=images).logits, labels)
    )


def whisper() -> Program:
    """Whisper-small, 4 x 3000 frames and 4 x 448 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, heads, inner, layers = size((768, 12, 3072, 12), (16, 2, 32, 1))
    config = WhisperConfig(
        d_model=width,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        encoder_layers=layers,
        decoder_layers=layers,
        use_cache=False,
    )
    sound, text = noise(size(4, 2), 80, 3000), integers(config.vocab_size, *size((4, 448), (2, 8)))
    return Program(
        WhisperForConditionalGeneration(config),
        lambda model: model(input_features=sound, labels=text).loss,
    )


def t5() -> Program:
    """T5-small, 16 x 512 tokens to 16 x 128."""
    from transformers import T5Config, T5ForConditionalGeneration

    width, heads, inner, layers = size((512, 8, 2048, 6), (16, 2, 32, 1))
    config = T5Config(
        d_model=width,
        d_kv=width // heads,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0,
        use_cache=False,
    )
    text, told = (integers(config.vocab_size, *size((16, length), (2, 8))) for length in (512, 128))
    return Program(
        T5ForConditionalGeneration(config),
        lambda model: model(input_ids=text, decoder_input_ids=told, labels=told).loss,
    )


# ---------------------------------------------------------------------------------- torchaudio


def conformer() -> Program:
    """12 layers of 512 channels, 16 x 600 frames."""
    from torchaudio.models import Conformer

    width, heads, inner, layers = size((512, 8, 2048, 12), (16, 2, 32, 1))
    model = Conformer(width, heads, inner, layers, 31)
    batch, frames = size((16, 600), (2, 10))
    x = noise(batch, frames, width)
    lengths = torch.full((batch,), frames, device=DEVICE)
    return Program(model, lambda model: error(model(x, lengths)[0]))


def hdemucs() -> Program:
    """hdemucs_low, 2 x 6 seconds at 8 kHz."""
    from torchaudio.models import hdemucs_low

    sound = noise(size(2, 1), 2, size(6, 1) * 8000)
    sources = ["drums", "bass", "other", "vocals"]
    return Program(hdemucs_low(sources), lambda model: error(model(sound)))


def tacotron2() -> Program:
    """32 texts of 60 symbols, 200 frames."""
    from torchaudio.models import Tacotron2

    batch, symbols, frames = size((32, 60, 200), (2, 5, 4))
    text, sound = integers(148, batch, symbols), noise(batch, 80, frames)
    lengths, ends = (torch.full((batch,), n, device=DEVICE) for n in (symbols, frames))

    def loss(model: nn.Module) -> Tensor:
        # Its prenet draws dropout also without training.
        torch.manual_seed(0)
        first, second, *_ = model(text, lengths, sound, ends)
        return (first - sound).square().mean() + (second - sound).square().mean()

    return Program(Tacotron2(), loss)


def wavernn() -> Program:
    """A vocoder of two GRUs of 512 units, 16 x 1000 samples."""
    from torchaudio.models import WaveRNN

    frames = size(10, 6)
    model = WaveRNN(upsample_scales=[5, 5, 8], n_classes=256, hop_length=200)
    sound, batch = (frames - 4) * 200, size(16, 1)
    wave, mel = noise(batch, 1, sound), noise(batch, 1, 128, frames)
    return Program(model, lambda model: error(model(wave, mel)))


def wav2vec2() -> Program:
    """wav2vec2_base, 8 x 5 seconds at 16 kHz."""
    from torchaudio.models import wav2vec2_model

    width, layers, heads, inner = size((768, 12, 12, 3072), (16, 1, 2, 32))
    model = wav2vec2_model(
        "group_norm", None, False, width, 0, 128, 16, layers, heads, 0, inner, 0, 0, False, 0, None
    )
    sound = noise(size(8, 1), size(5, 1) * 16000)
    return Program(model, lambda model: error(model(sound)[0]))


# ------------------------------------------------------------------------------- images and graphs


def classifier(model: nn.Module, batch: int, pixels: int) -> Program:
    images, labels = noise(batch, 3, pixels, pixels), integers(1000, batch)
    return Program(model, lambda model: functional.cross_entropy(model(images), labels))


def resnet50() -> Program:
    """64 images of 224 x 224."""
    from torchvision.models import resnet50

    return classifier(resnet50(), size(64, 2), size(224, 32))


def swin() -> Program:
    """Swin-T, 64 images of 224 x 224."""
    from torchvision.models.swin_transformer import SwinTransformer

    width, depths, heads = size((96, [2, 2, 6, 2], [3, 6, 12, 24]), (16, [1, 1], [2, 2]))
    model = SwinTransformer([4, 4], width, depths, heads, [7, 7], stochastic_depth_prob=0.0)
    return classifier(model, size(64, 2), size(224, 56))


def mixer() -> Program:
    """Mixer-B/16, 64 images of 224 x 224."""
    from timm.models.mlp_mixer import MlpMixer

    width, blocks = size((768, 12), (16, 1))
    model = MlpMixer(img_size=size(224, 32), embed_dim=width, num_blocks=blocks)
    return classifier(model, size(64, 2), size(224, 32))


def convnext() -> Program:
    """ConvNeXt-T, 64 images of 224 x 224."""
    from timm.models.convnext import ConvNeXt

    depths, widths = size(((3, 3, 9, 3), (96, 192, 384, 768)), ((1, 1, 1, 1), (8, 8, 16, 16)))
    model = ConvNeXt(depths=depths, dims=widths)
    return classifier(model, size(64, 2), size(224, 64))


def graphsage() -> Program:
    """Three layers of 256 channels, 100,000 nodes and a million edges."""
    from torch_geometric.nn import GraphSAGE

    nodes, edges, width = size((100_000, 1_000_000, 256), (50, 200, 16))
    x, links = noise(nodes, width), integers(nodes, 2, edges)
    return Program(GraphSAGE(width, width, 3), lambda model: error(model(x, links)))


def gat() -> Program:
    """Three layers of 256 channels in 8 heads, 20,000 nodes and 200,000 edges."""
    from torch_geometric.nn import GAT

    nodes, edges, width = size((20_000, 200_000, 256), (50, 200, 16))
    x, links = noise(nodes, width), integers(nodes, 2, edges)
    return Program(GAT(width, width, 3, heads=8), lambda model: error(model(x, links)))


# ------------------------------------------------------------------------------ over torch.nn alone


class PairUpdate(nn.Module):
    """Triangle multiplication and transition of a pair representation, as in structure prediction
    (Jumper et al., 2021, supplement, algorithms 11 and 15)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_out, self.norm_transition = (nn.LayerNorm(width) for _ in range(3))
        self.a, self.b, self.gate_a, self.gate_b, self.gate, self.out = (
            nn.Linear(width, width) for _ in range(6)
        )
        self.transition = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, pair: Tensor) -> Tensor:
        z = self.norm(pair)
        a, b = self.gate_a(z).sigmoid() * self.a(z), self.gate_b(z).sigmoid() * self.b(z)
        update = self.norm_out(torch.einsum("bikc,bjkc->bijc", a, b))
        pair = pair + self.gate(z).sigmoid() * self.out(update)
        return pair + self.transition(self.norm_transition(pair))


def pair_update() -> Program:
    """Four updates of 128 channels, 384 x 384."""
    width, length, layers = size((128, 384, 4), (8, 6, 1))
    model = nn.Sequential(*(PairUpdate(width) for _ in range(layers)))
    pair = noise(1, length, length, width)
    return Program(model, lambda model: error(model(pair)))


def neural_ode() -> Program:
    """torchdiffeq's rk4 over an MLP 64-1024-1024-64, 4096 rows, 10 steps."""
    from torchdiffeq import odeint

    width, inner, rows = size((64, 1024, 4096), (4, 8, 3))
    model = nn.Sequential(
        nn.Linear(width, inner),
        nn.Tanh(),
        nn.Linear(inner, inner),
        nn.Tanh(),
        nn.Linear(inner, width),
    )
    y, times = noise(rows, width), torch.linspace(0, 1, 11, device=DEVICE)

    def loss(model: nn.Module) -> Tensor:
        return error(odeint(lambda _, y: model(y), y, times, method="rk4")[-1])

    return Program(model, loss)


def pinn() -> Program:
    """Poisson's equation, solved by a network whose Laplacian comes from autograd."""
    width, points = size((512, 65536), (16, 32))
    inner = [part for _ in range(6) for part in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), *inner, nn.Linear(width, 1))
    x = torch.rand(points, 3, device=DEVICE, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        curved = [
            torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(3)
        ]
        return (sum(curved) - x.sin().sum(1)).square().mean()

    return Program(model, loss)


class WordModel(nn.Module):
    """Embedding, LSTM layers and a linear layer to the vocabulary."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers)
        self.out = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(text))[0])


def words() -> Program:
    """A language model of two LSTM layers of 650 units and 10,000 words, 35 x 64."""
    count, width, steps, batch = size((10_000, 650, 35, 64), (50, 8, 4, 2))
    text = integers(count, steps, batch)

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(text).flatten(0, 1), text.flatten())

    return Program(WordModel(count, width, 2), loss)


def speech() -> Program:
    """Four bidirectional LSTM layers of 512 units over packed sequences, 32 x at most 400."""
    inputs, hidden, layers, batch, steps = size((80, 512, 4, 32, 400), (4, 5, 2, 2, 6))
    model = nn.LSTM(inputs, hidden, layers, bidirectional=True)
    lengths = torch.linspace(steps // 2, steps, batch).long().flip(0)
    packed = nn.utils.rnn.pack_padded_sequence(noise(steps, batch, inputs), lengths)
    return Program(model, lambda model: error(model(packed)[0].data))


def time_series() -> Program:
    """Two LSTM layers of 128 units, 256 x 168."""
    inputs, hidden, batch, steps = size((8, 128, 256, 168), (2, 5, 2, 6))
    model = nn.LSTM(inputs, hidden, 2, batch_first=True)
    x = noise(batch, steps, inputs)
    return Program(model, lambda model: error(model(x)[0][:, -1]))


def reinforcement() -> Program:
    """A GRU policy of 64 units, 32 steps of 512 environments, with Adam's step."""
    hidden, steps, batch = size((64, 32, 512), (5, 4, 3))
    model, x = nn.GRU(hidden, hidden), noise(steps, batch, hidden)
    return Program(model, lambda model: error(model(x)[0]), torch.optim.Adam)


PROGRAMS: dict[str, Callable[[], Program]] = {
    make.__name__: make
    for make in (
        bert, llama, vit, gpt2, whisper, t5, conformer, wav2vec2, resnet50, convnext, swin, mixer,
        pair_update, graphsage, gat, neural_ode, pinn, speech, words, time_series, reinforcement,
        hdemucs, wavernn, tacotron2,
    )
}  # fmt: skip
# Under torch.compile as well.
COMPILED = ("bert", "llama", "vit")
