"""ResNet-18 and MobileNet-V2 with torchvision's parameter names, and weights from files.

Both map images ``(n, 3, height, width)`` to logits ``(n, K)`` or, without a head, to a feature vector
per image: 512 numbers for ResNet-18, 1280 for MobileNet-V2. Weights are safetensors files that hold a
torchvision state dict; torchvision itself is not needed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedgmm.support.checks import check_choice, check_integer
from fedgmm.wording import counted


class WeightsError(ValueError):
    """A weights file is missing, cannot be read or does not fit the network."""


class Backbone(nn.Module):
    """A network that can load pretrained weights."""

    torchvision_name: ClassVar[
        str
    ]  # the function in ``torchvision.models`` with the same parameters
    head_prefix: ClassVar[str]  # of the names of the head's parameters
    feature_size: int  # length of the feature vector that the head reads


# ---------------------------------------------------------------------- ResNet-18


class _Residual(nn.Module):
    """``ReLU(x + F(x))`` with two 3×3 convolutions in ``F``; ``x`` is projected if shapes differ."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(Backbone):
    """ResNet-18: a 7×7 stem, eight residual blocks, average pooling, a linear head if there are classes."""

    torchvision_name = "resnet18"
    head_prefix = "fc."

    def __init__(self, classes: int | None = None) -> None:
        super().__init__()
        self.feature_size = 512
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(_Residual(64, 64, 1), _Residual(64, 64, 1))
        self.layer2 = nn.Sequential(_Residual(64, 128, 2), _Residual(128, 128, 1))
        self.layer3 = nn.Sequential(_Residual(128, 256, 2), _Residual(256, 256, 1))
        self.layer4 = nn.Sequential(_Residual(256, 512, 2), _Residual(512, 512, 1))
        self.fc: nn.Module = nn.Identity()
        if classes is not None:
            check_integer("classes", classes, 1)
            self.fc = nn.Linear(self.feature_size, classes)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, K)`` or features ``(n, 512)`` of images ``(n, 3, height, width)``."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


# ---------------------------------------------------------------------- MobileNet-V2

# expansion, channels, blocks, stride of the first block: table 2 of the MobileNet-V2 paper
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(
    channels_in: int, channels: int, size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution with batch normalisation and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
    )


class _InvertedResidual(nn.Module):
    """Expansion (1×1), depthwise filter (3×3), projection (1×1); plus ``x`` if shapes agree."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        widen = [] if expansion == 1 else [_convolution(channels_in, wide, 1)]
        self.conv = nn.Sequential(
            *widen,
            _convolution(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.adds_input = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.adds_input else out


class MobileNetV2(Backbone):
    """MobileNet-V2: a 3×3 stem, 17 inverted residuals, 1280 channels, average pooling, a linear head.

    Without ``classes`` there is no head. ``width`` is a factor for the channels of every layer;
    pretrained weights have width 1.
    """

    torchvision_name = "mobilenet_v2"
    head_prefix = "classifier.1."

    def __init__(
        self, classes: int | None = None, *, width: float = 1.0, dropout: float = 0.2
    ) -> None:
        super().__init__()
        if not width > 0:
            raise ValueError(f"width must be positive, got {width!r}.")
        self.feature_size = _channels(1280 * max(1.0, width))
        channels = _channels(32 * width)
        layers: list[nn.Module] = [_convolution(3, channels, 3, stride=2)]
        for expansion, base, blocks, first_stride in _STAGES:
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                layers.append(
                    _InvertedResidual(channels, _channels(base * width), stride, expansion)
                )
                channels = _channels(base * width)
        layers.append(_convolution(channels, self.feature_size, 1))
        self.features = nn.Sequential(*layers)
        self.classifier: nn.Module = nn.Identity()
        if classes is not None:
            check_integer("classes", classes, 1)
            head = nn.Linear(self.feature_size, classes)
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
            self.classifier = nn.Sequential(nn.Dropout(dropout), head)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(n, K)`` or features ``(n, 1280)`` of images ``(n, 3, height, width)``."""
        out: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return out


def _channels(wanted: float) -> int:
    """Round to the nearest multiple of eight that is at least nine tenths of ``wanted``."""
    nearest = max(8, int(wanted + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * wanted else nearest + 8


def _initialise_convolutions(module: nn.Module) -> None:
    """Apply He's initialisation (fan-out), as the code of both papers does."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


BACKBONES: dict[str, type[ResNet18] | type[MobileNetV2]] = {
    "resnet18": ResNet18,
    "mobilenet_v2": MobileNetV2,
}


def weights_file(name: str, data_dir: Path) -> Path:
    """Return the path of a backbone's ImageNet weights in the data folder."""
    check_choice("backbone", name, list(BACKBONES))
    return data_dir / "weights" / f"{name}_imagenet.safetensors"


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue in [0, 1] that pretrained networks expect."""


def read_plain_pixels(module: Backbone) -> None:
    """Change a network for ImageNet's scaling of pixels so that it reads pixels in [-1, 1], in place.

    The scale goes into the first convolution and the shift into the normalisation after it. Only the
    padding differs: it is mid-grey instead of ImageNet's mean colour.
    """
    first = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
    norm = next(part for part in module.modules() if isinstance(part, nn.BatchNorm2d))
    mean = torch.tensor(IMAGENET_MEAN).to(first.weight)[:, None, None]
    deviation = torch.tensor(IMAGENET_DEVIATION).to(first.weight)[:, None, None]
    with torch.no_grad():
        # (p - mean) / deviation = (x + 1 - 2 mean) / (2 deviation) for p = (x + 1) / 2
        first.weight.div_(2.0 * deviation)
        shift = (first.weight * (1.0 - 2.0 * mean)).sum((1, 2, 3))
        assert norm.running_mean is not None
        norm.running_mean.sub_(shift)


# ---------------------------------------------------------------------- weights


def load_weights(module: Backbone, path: str | Path) -> str:
    """Read a torchvision state dict into a backbone, in place; return the SHA-256 of the file.

    The ``.safetensors`` file must have every parameter and running statistic of the body in the
    right shape; otherwise, or if it cannot be read, :class:`WeightsError` is raised. The head is
    read if it fits. If it is missing or has another number of classes, the module's head is kept.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    file, kind = Path(path), type(module).__name__

    def refused(problem: str) -> WeightsError:
        return WeightsError(
            f"{problem}; with torchvision installed, write one by safetensors.torch.save_file("
            f"torchvision.models.{module.torchvision_name}(weights='IMAGENET1K_V1').state_dict(), FILE)."
        )

    try:
        data = file.read_bytes()
        arrays = load(data)
    except FileNotFoundError:
        raise refused(f"There is no weights file at {file}") from None
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise refused(f"The weights in {file} cannot be read ({reason})") from None
    wanted = module.state_dict()
    head = [name for name in wanted if name.startswith(module.head_prefix)]
    head_fits = all(name in arrays and arrays[name].shape == wanted[name].shape for name in head)
    kept = [] if head_fits else head
    # Counters of batches are not used, and many files omit them.
    needed = [n for n in wanted if n not in kept and not n.endswith("num_batches_tracked")]
    for name in needed:
        value, problem = arrays.get(name), ""
        if value is None:
            problem = "is missing"
        elif value.shape != wanted[name].shape:
            problem = f"has shape {tuple(value.shape)} instead of {tuple(wanted[name].shape)}"
        elif not value.is_floating_point():
            problem = f"has dtype {value.dtype}"
        elif not bool(torch.isfinite(value).all()):
            problem = "contains NaN or infinity"
        if problem:
            raise refused(f"{file} does not fit {kind}: {name!r} {problem}")
    unknown = sorted(n for n in arrays if n not in wanted and not n.startswith(module.head_prefix))
    if unknown:
        number = counted(len(unknown), "array")
        raise refused(f"{file} holds {number} that {kind} does not have, such as {unknown[0]!r}")
    module.load_state_dict(wanted | {name: arrays[name] for name in needed})
    return hashlib.sha256(data).hexdigest()
