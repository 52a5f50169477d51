"""Layers of my_ops in PyTorch Lightning and in Hugging Face's Trainer: `nox -s trainers`."""

import lightning
import pytest
import torch
import transformers
from safetensors.torch import load_file

import my_ops

STEPS = 30


class Model(torch.nn.Module):
    """Predicts whether a sequence of numbers sums to more than zero."""

    def __init__(self):
        super().__init__()
        self.layer = my_ops.nn.LLTM(1, 8)
        self.hidden = my_ops.nn.LinearActivation(8, 8, activation="gelu")
        self.decide = my_ops.nn.Linear(8, 1)

    def forward(self, inputs, labels):
        output, _ = self.layer(inputs.transpose(0, 1))
        logits = self.decide(self.hidden(output[-1])).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels), logits


@pytest.fixture
def data():
    torch.manual_seed(0)
    inputs = torch.randn(256, 6, 1)
    return torch.utils.data.TensorDataset(inputs, (inputs.sum((1, 2)) > 0).float())


@torch.no_grad()
def loss_of(model, data):
    return model(*data.tensors)[0].item()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision, data, tmp_path):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, index):
            return self.model(*batch)[0]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.02)

    module = Module()
    before = loss_of(module.model, data)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 32, shuffle=True))
    assert loss_of(module.model, data) < 0.7 * before
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loss_of(again.model, data) == loss_of(module.model, data)


@pytest.mark.parametrize("bf16", [False, True])
def test_hugging_face_trainer(bf16, data, tmp_path):
    model = Model()
    before = loss_of(model, data)
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=32,
        learning_rate=0.02,
        bf16=bf16,
        use_cpu=True,
        report_to=[],
        save_steps=STEPS,
        disable_tqdm=True,
    )
    items = [{"inputs": x, "labels": y} for x, y in data]
    trainer = transformers.Trainer(model, options, train_dataset=items)
    trainer.train()
    assert loss_of(model, data) < 0.7 * before
    state = next((tmp_path / f"checkpoint-{STEPS}").glob("*.safetensors"))
    want = model.state_dict()
    assert all(torch.equal(t, want[name]) for name, t in load_file(state).items())
