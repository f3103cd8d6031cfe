"""Models of transformers, peft, diffusers, timm and torchvision, built small from their configs, as tasks. Nobody here
wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from rung.spec.task import Task

try:
    import torchvision
except RuntimeError:  # a wheel made for CUDA beside a torch without: two operators for object detection are missing
    _missing = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
import transformers

_CLASSES = 5


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of models and data. As they are, two cores train every model in seconds."""

    samples: int = 12
    length: int = 12
    vocabulary: int = 61
    width: int = 32
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    image: int = 32  # pixels for transformers' models
    patch: int = 8
    photo: int = 64  # pixels for timm's and torchvision's

    @property
    def named(self) -> dict[str, int]:
        """By the names that most configs give them."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @property
    def named_otherwise(self) -> dict[str, int]:
        """By the names that other configs have for the same sizes."""
        width, inner, layers, heads = self.width, self.inner, self.layers, self.heads
        return {
            "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": self.positions, "n_inner": inner,
            "d_model": width, "d_ff": inner, "d_kv": self.head, "num_layers": layers, "num_heads": heads,
            "num_decoder_layers": layers, "encoder_layers": layers, "decoder_layers": layers,
            "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": inner,
            "decoder_ffn_dim": inner, "ffn_dim": inner, "word_embed_proj_dim": width, "dim": width,
            "n_layers": layers, "n_heads": heads, "hidden_dim": inner, "embedding_size": width,
            "decoder_start_token_id": 1, "rotary_dim": self.head // 2, "num_key_value_heads": self.key_heads,
            "head_dim": self.head, "d_inner": inner, "expand_ratio": 2,
        }  # fmt: skip

    @property
    def named_sizes(self) -> str:
        """In words, for the name of a job."""
        sizes = f"batch {self.samples}, width {self.width}, {self.layers} layers, length {self.length}"
        return sizes if self.image == Scale().image else f"{sizes}, {self.photo} pixels"

    @property
    def inner(self) -> int:
        return 2 * self.width

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def positions(self) -> int:
        return max(64, self.length + 8)  # some models number positions from the padding on


class _Dicts(Dataset[dict[str, Tensor]]):
    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def _tokens(scale: Scale, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, scale.vocabulary, (count, scale.length), generator=generator)


def _classes(count: int) -> Tensor:
    return torch.randint(_CLASSES, (count,), generator=torch.Generator().manual_seed(count + 1))


def _images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def _task(
    scale: Scale, model: Callable[[], nn.Module], data: Callable[[int], Any], loss: Callable[..., Tensor], **more: Any
) -> Task:
    return Task(
        model=model,
        train_data=lambda: data(scale.samples),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01),
        **more,
    )


def _from_config(scale: Scale, kind: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        of = getattr(transformers, config)
        known = vars(of())
        sizes = {name: value for name, value in {**scale.named, **scale.named_otherwise}.items() if name in known}
        made = of(**{**sizes, **changes})
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    return build


def _causal(scale: Scale, kind: str, config: str, **changes: Any) -> Task:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(scale, count), target=_tokens(scale, count))

    return _task(scale, _from_config(scale, kind, config, **{"use_cache": False, **changes}), data, loss)


def _encoder(scale: Scale, kind: str, config: str, **changes: Any) -> Task:
    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(scale, count), target=_classes(count))

    build = _from_config(scale, kind, config, num_labels=_CLASSES, **changes)
    return _task(scale, build, data, lambda output, target: F.cross_entropy(output.logits, target))


def _translator(scale: Scale, kind: str, config: str, **changes: Any) -> Task:
    def data(count: int) -> Any:
        return _Dicts(
            input_ids=_tokens(scale, count), decoder_input_ids=_tokens(scale, count), target=_tokens(scale, count)
        )

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return _task(scale, _from_config(scale, kind, config, **{"use_cache": False, **changes}), data, loss)


def _seer(scale: Scale, kind: str, config: str, size: int = 0, **changes: Any) -> Task:
    size = size or scale.image

    def data(count: int) -> Any:
        return _Dicts(pixel_values=_images(count, size), target=_classes(count))

    given = {"image_size": size, "patch_size": scale.patch, "num_labels": _CLASSES, **changes}
    return _task(
        scale,
        _from_config(scale, kind, config, **given),
        data,
        lambda output, target: F.cross_entropy(output.logits, target),
    )


def _contrastive(scale: Scale, kind: str, config: str) -> Task:
    def build() -> nn.Module:
        text = {**scale.named, "projection_dim": 16}
        vision = {name: size for name, size in scale.named.items() if "token" not in name}
        vision |= {"image_size": scale.image, "patch_size": scale.patch}
        made = getattr(transformers, config)(text_config=text, vision_config=vision, projection_dim=16)
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(scale, count), pixel_values=_images(count, scale.image), target=_classes(count))

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = 10 * output.text_embeds @ output.image_embeds.T
        places = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

    return _task(scale, build, data, loss, loss_scope="batch")


def _timm(scale: Scale, name: str, size: int = 0, **changes: Any) -> Task:
    def build() -> nn.Module:
        import timm  # not everywhere where the others are

        model: nn.Module = timm.create_model(name, num_classes=_CLASSES, **changes)
        return model

    return _task(
        scale, build, lambda count: TensorDataset(_images(count, size or scale.photo), _classes(count)), F.cross_entropy
    )


def _torchvision(scale: Scale, name: str, size: int = 0, **changes: Any) -> Task:
    def build() -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES, **changes)
        return model

    return _task(
        scale, build, lambda count: TensorDataset(_images(count, size or scale.photo), _classes(count)), F.cross_entropy
    )


def _segmenter(scale: Scale, name: str, **changes: Any) -> Task:
    def build() -> nn.Module:
        given = {"weights": None, "weights_backbone": None, "num_classes": _CLASSES, **changes}
        model: nn.Module = torchvision.models.get_model(name, **given)
        return model

    def data(count: int) -> Any:
        target = torch.randint(
            _CLASSES, (count, scale.photo, scale.photo), generator=torch.Generator().manual_seed(count + 1)
        )
        return TensorDataset(_images(count, scale.photo), target)

    return _task(scale, build, data, lambda output, target: F.cross_entropy(output["out"], target))


class _Detector(nn.Module):
    """torchvision's detectors take lists and compute their own loss: as a module that takes tensors of a batch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        given = {"weights": None, "weights_backbone": None, "num_classes": _CLASSES, "min_size": 64, "max_size": 64}
        self.detector: nn.Module = torchvision.models.get_model(name, **given)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        targets = [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]
        losses: dict[str, Tensor] = self.detector(list(images), targets)
        return torch.stack(list(losses.values())).sum()


def _detector(scale: Scale, name: str) -> Task:
    def data(count: int) -> Any:
        corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(count + 2)) * 30
        boxes = torch.cat([corners, corners + 24], dim=2)
        labels = torch.stack([_classes(count), _classes(count + 1)[:count]], dim=1).clamp(min=1)
        return _Dicts(images=_images(count, 64).sigmoid(), boxes=boxes, labels=labels, target=_classes(count))

    return _task(scale, lambda: _Detector(name), data, lambda output, target: output)


def _adapted(base: Task, config: str, **changes: Any) -> Task:
    """A frozen model with adapters of peft."""

    def build() -> nn.Module:
        import peft

        model: nn.Module = peft.get_peft_model(base.model(), getattr(peft, config)(**changes))
        return model

    return dataclasses.replace(base, model=build)


def _denoiser(scale: Scale, kind: str, *, text: bool = False, **sizes: Any) -> Task:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, kind)(
            sample_size=16, in_channels=3, out_channels=3, norm_num_groups=8, **sizes
        )
        return model

    def data(count: int) -> Any:
        steps = torch.randint(1000, (count,), generator=torch.Generator().manual_seed(count + 3))
        columns = {"sample": _images(count, 16), "timestep": steps, "target": _images(count + 1, 16)[:count]}
        if text:
            columns["encoder_hidden_states"] = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(4))
        return _Dicts(**columns)

    return _task(scale, build, data, lambda output, target: F.mse_loss(output.sample, target))


ZOO: dict[str, tuple[str, Callable[[Scale], Task]]] = {
    name: (family, make)
    for family, tasks in {
        "causal": {
            "GPT-2": lambda s: _causal(s, "GPT2LMHeadModel", "GPT2Config"),
            "GPT-Neo": lambda s: _causal(
                s, "GPTNeoForCausalLM", "GPTNeoConfig", attention_types=[[["global", "local"], s.layers // 2]]),
            "GPT-NeoX": lambda s: _causal(s, "GPTNeoXForCausalLM", "GPTNeoXConfig"),
            "GPT-J": lambda s: _causal(s, "GPTJForCausalLM", "GPTJConfig"),
            "OPT": lambda s: _causal(s, "OPTForCausalLM", "OPTConfig"),
            "BLOOM": lambda s: _causal(s, "BloomForCausalLM", "BloomConfig"),
            "Llama": lambda s: _causal(s, "LlamaForCausalLM", "LlamaConfig"),
            "Mistral": lambda s: _causal(s, "MistralForCausalLM", "MistralConfig"),
            "Qwen2": lambda s: _causal(s, "Qwen2ForCausalLM", "Qwen2Config"),
            "Qwen3": lambda s: _causal(s, "Qwen3ForCausalLM", "Qwen3Config"),
            "Gemma": lambda s: _causal(s, "GemmaForCausalLM", "GemmaConfig"),
            "Gemma 2": lambda s: _causal(s, "Gemma2ForCausalLM", "Gemma2Config"),
            "Phi": lambda s: _causal(s, "PhiForCausalLM", "PhiConfig"),
            "Phi-3": lambda s: _causal(s, "Phi3ForCausalLM", "Phi3Config"),
            "StableLM": lambda s: _causal(s, "StableLmForCausalLM", "StableLmConfig"),
            "Falcon": lambda s: _causal(s, "FalconForCausalLM", "FalconConfig"),
            "MPT": lambda s: _causal(s, "MptForCausalLM", "MptConfig", max_seq_len=s.positions),
            "CodeGen": lambda s: _causal(s, "CodeGenForCausalLM", "CodeGenConfig"),
            "OLMo": lambda s: _causal(s, "OlmoForCausalLM", "OlmoConfig"),
            "Cohere": lambda s: _causal(s, "CohereForCausalLM", "CohereConfig"),
            "StarCoder2": lambda s: _causal(s, "Starcoder2ForCausalLM", "Starcoder2Config"),
            "Granite": lambda s: _causal(s, "GraniteForCausalLM", "GraniteConfig"),
        },
        "mixture of experts": {
            "Mixtral": lambda s: _causal(s, "MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
            "Qwen2-MoE": lambda s: _causal(
                s, "Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, moe_intermediate_size=32,
                shared_expert_intermediate_size=32),
        },
        "state space": {
            "Mamba": lambda s: _causal(s, "MambaForCausalLM", "MambaConfig", state_size=4),
            "RWKV": lambda s: _causal(s, "RwkvForCausalLM", "RwkvConfig", attention_hidden_size=s.width),
        },
        "encoder": {
            "BERT": lambda s: _encoder(s, "BertForSequenceClassification", "BertConfig"),
            "RoBERTa": lambda s: _encoder(s, "RobertaForSequenceClassification", "RobertaConfig"),
            "ALBERT": lambda s: _encoder(s, "AlbertForSequenceClassification", "AlbertConfig"),
            "DistilBERT": lambda s: _encoder(s, "DistilBertForSequenceClassification", "DistilBertConfig"),
            "ELECTRA": lambda s: _encoder(s, "ElectraForSequenceClassification", "ElectraConfig"),
            "DeBERTa-v2": lambda s: _encoder(s, "DebertaV2ForSequenceClassification", "DebertaV2Config"),
            "MPNet": lambda s: _encoder(s, "MPNetForSequenceClassification", "MPNetConfig"),
            "ModernBERT": lambda s: _encoder(s, "ModernBertForSequenceClassification", "ModernBertConfig"),
        },
        "encoder-decoder": {
            "T5": lambda s: _translator(s, "T5ForConditionalGeneration", "T5Config"),
            "BART": lambda s: _translator(s, "BartForConditionalGeneration", "BartConfig"),
            "Pegasus": lambda s: _translator(s, "PegasusForConditionalGeneration", "PegasusConfig"),
            "mBART": lambda s: _translator(s, "MBartForConditionalGeneration", "MBartConfig"),
        },
        "vision": {
            "ViT": lambda s: _seer(s, "ViTForImageClassification", "ViTConfig"),
            "DeiT": lambda s: _seer(s, "DeiTForImageClassification", "DeiTConfig"),
            "BEiT": lambda s: _seer(s, "BeitForImageClassification", "BeitConfig"),
            "DINOv2": lambda s: _seer(s, "Dinov2ForImageClassification", "Dinov2Config"),
            "Swin (HF)": lambda s: _seer(
                s, "SwinForImageClassification", "SwinConfig", patch_size=4, embed_dim=16, depths=[1, 1],
                num_heads=[2, 4], window_size=4),
            "ConvNeXt (HF)": lambda s: _seer(
                s, "ConvNextForImageClassification", "ConvNextConfig", size=s.photo, patch_size=4,
                hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1]),
        },
        "contrastive": {
            "CLIP": lambda s: _contrastive(s, "CLIPModel", "CLIPConfig"),
        },
        "timm": {
            "resnet10t": lambda s: _timm(s, "resnet10t"),
            "mobilenetv3_small_050": lambda s: _timm(s, "mobilenetv3_small_050"),
            "efficientnet_lite0": lambda s: _timm(s, "efficientnet_lite0"),
            "convnext_atto": lambda s: _timm(s, "convnext_atto"),
            "vit_tiny_patch16_224": lambda s: _timm(s, "vit_tiny_patch16_224", img_size=s.photo, depth=2),
            "mixer_s32_224": lambda s: _timm(s, "mixer_s32_224", img_size=s.photo),
            "regnetx_002": lambda s: _timm(s, "regnetx_002"),
            "cait_xxs24_224": lambda s: _timm(s, "cait_xxs24_224", img_size=s.photo, depth=2),
            "poolformer_s12": lambda s: _timm(s, "poolformer_s12"),
            "edgenext_xx_small": lambda s: _timm(s, "edgenext_xx_small"),
            "ghostnet_050": lambda s: _timm(s, "ghostnet_050"),
            "levit_128s": lambda s: _timm(s, "levit_128s", size=224),
        },
        "torchvision": {
            "resnet18": lambda s: _torchvision(s, "resnet18"),
            "mobilenet_v2": lambda s: _torchvision(s, "mobilenet_v2"),
            "shufflenet_v2_x0_5": lambda s: _torchvision(s, "shufflenet_v2_x0_5"),
            "squeezenet1_1": lambda s: _torchvision(s, "squeezenet1_1"),
            "mnasnet0_5": lambda s: _torchvision(s, "mnasnet0_5"),
            "efficientnet_b0": lambda s: _torchvision(s, "efficientnet_b0"),
            "swin_t": lambda s: _torchvision(s, "swin_t"),
            "lraspp_mobilenet_v3_large": lambda s: _segmenter(s, "lraspp_mobilenet_v3_large"),
            "fcn_resnet50": lambda s: _segmenter(s, "fcn_resnet50"),
            "retinanet_resnet50_fpn": lambda s: _detector(s, "retinanet_resnet50_fpn"),
        },
        "adapters (peft)": {
            "GPT-2 + LoRA": lambda s: _adapted(
                _causal(s, "GPT2LMHeadModel", "GPT2Config"), "LoraConfig", r=4, target_modules=["c_attn", "c_fc"],
                fan_in_fan_out=True),
            "Llama + LoRA": lambda s: _adapted(
                _causal(s, "LlamaForCausalLM", "LlamaConfig"), "LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
            "Llama + IA3": lambda s: _adapted(
                _causal(s, "LlamaForCausalLM", "LlamaConfig"), "IA3Config", target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"]),
            "BERT + LoRA": lambda s: _adapted(
                _encoder(s, "BertForSequenceClassification", "BertConfig"), "LoraConfig", r=4,
                target_modules=["query", "value"], modules_to_save=["classifier"]),
        },
        "diffusion (diffusers)": {
            "UNet2D": lambda s: _denoiser(
                s, "UNet2DModel", layers_per_block=1, block_out_channels=(16, 32), attention_head_dim=8,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
            "UNet2D with text": lambda s: _denoiser(
                s, "UNet2DConditionModel", text=True, layers_per_block=1, block_out_channels=(16, 32),
                attention_head_dim=4, cross_attention_dim=32,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
        },
    }.items()
    for name, make in tasks.items()
}  # fmt: skip
