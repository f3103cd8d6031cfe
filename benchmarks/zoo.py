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
import diffusers
import peft
import timm
import transformers

_COUNT, _LENGTH, _VOCABULARY, _CLASSES = 12, 12, 61, 5
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OTHER_NAMES = {  # configs with names of their own for the same sizes
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64,
    "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "num_decoder_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64, "word_embed_proj_dim": 32,
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "embedding_size": 32, "decoder_start_token_id": 1,
    "rotary_dim": 4, "num_key_value_heads": 2, "head_dim": 8, "d_inner": 64, "expand_ratio": 2,
}  # fmt: skip


class _Dicts(Dataset[dict[str, Tensor]]):
    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def _tokens(count: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, (count, _LENGTH), generator=torch.Generator().manual_seed(count))


def _classes(count: int) -> Tensor:
    return torch.randint(_CLASSES, (count,), generator=torch.Generator().manual_seed(count + 1))


def _images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def _task(model: Callable[[], nn.Module], data: Callable[[int], Any], loss: Callable[..., Tensor], **more: Any) -> Task:
    return Task(
        model=model,
        train_data=lambda: data(_COUNT),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01),
        **more,
    )


def _from_config(kind: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        of = getattr(transformers, config)
        known = vars(of())
        sizes = {name: value for name, value in {**_SIZES, **_OTHER_NAMES}.items() if name in known}
        made = of(**{**sizes, **changes})
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    return build


def _causal(kind: str, config: str, **changes: Any) -> Task:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(count), target=_tokens(count))

    return _task(_from_config(kind, config, **{"use_cache": False, **changes}), data, loss)


def _encoder(kind: str, config: str, **changes: Any) -> Task:
    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(count), target=_classes(count))

    build = _from_config(kind, config, num_labels=_CLASSES, **changes)
    return _task(build, data, lambda output, target: F.cross_entropy(output.logits, target))


def _translator(kind: str, config: str, **changes: Any) -> Task:
    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(count), decoder_input_ids=_tokens(count), target=_tokens(count))

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return _task(_from_config(kind, config, **{"use_cache": False, **changes}), data, loss)


def _seer(kind: str, config: str, size: int = 32, **changes: Any) -> Task:
    def data(count: int) -> Any:
        return _Dicts(pixel_values=_images(count, size), target=_classes(count))

    given = {"image_size": size, "patch_size": 8, "num_labels": _CLASSES, **changes}
    return _task(
        _from_config(kind, config, **given), data, lambda output, target: F.cross_entropy(output.logits, target)
    )


def _contrastive(kind: str, config: str) -> Task:
    def build() -> nn.Module:
        text = {**_SIZES, "projection_dim": 16}
        vision = {**{k: v for k, v in _SIZES.items() if "token" not in k}, "image_size": 32, "patch_size": 8}
        made = getattr(transformers, config)(text_config=text, vision_config=vision, projection_dim=16)
        model: nn.Module = getattr(transformers, kind)(made)
        return model

    def data(count: int) -> Any:
        return _Dicts(input_ids=_tokens(count), pixel_values=_images(count, 32), target=_classes(count))

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = 10 * output.text_embeds @ output.image_embeds.T
        places = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

    return _task(build, data, loss, loss_scope="batch")


def _timm(name: str, size: int = 64, **changes: Any) -> Task:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=_CLASSES, **changes)
        return model

    return _task(build, lambda count: TensorDataset(_images(count, size), _classes(count)), F.cross_entropy)


def _torchvision(name: str, size: int = 64, **changes: Any) -> Task:
    def build() -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES, **changes)
        return model

    return _task(build, lambda count: TensorDataset(_images(count, size), _classes(count)), F.cross_entropy)


def _segmenter(name: str, **changes: Any) -> Task:
    def build() -> nn.Module:
        given = {"weights": None, "weights_backbone": None, "num_classes": _CLASSES, **changes}
        model: nn.Module = torchvision.models.get_model(name, **given)
        return model

    def data(count: int) -> Any:
        target = torch.randint(_CLASSES, (count, 64, 64), generator=torch.Generator().manual_seed(count + 1))
        return TensorDataset(_images(count, 64), target)

    return _task(build, data, lambda output, target: F.cross_entropy(output["out"], target))


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


def _detector(name: str) -> Task:
    def data(count: int) -> Any:
        corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(count + 2)) * 30
        boxes = torch.cat([corners, corners + 24], dim=2)
        labels = torch.stack([_classes(count), _classes(count + 1)[:count]], dim=1).clamp(min=1)
        return _Dicts(images=_images(count, 64).sigmoid(), boxes=boxes, labels=labels, target=_classes(count))

    return _task(lambda: _Detector(name), data, lambda output, target: output)


def _adapted(base: Task, config: str, **changes: Any) -> Task:
    """A frozen model with adapters of peft."""

    def build() -> nn.Module:
        model: nn.Module = peft.get_peft_model(base.model(), getattr(peft, config)(**changes))
        return model

    return dataclasses.replace(base, model=build)


def _denoiser(kind: str, *, text: bool = False, **sizes: Any) -> Task:
    def build() -> nn.Module:
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

    return _task(build, data, lambda output, target: F.mse_loss(output.sample, target))


ZOO: dict[str, tuple[str, Callable[[], Task]]] = {
    name: (family, make)
    for family, tasks in {
        "causal": {
            "GPT-2": lambda: _causal("GPT2LMHeadModel", "GPT2Config"),
            "GPT-Neo": lambda: _causal("GPTNeoForCausalLM", "GPTNeoConfig", attention_types=[[["global", "local"], 1]]),
            "GPT-NeoX": lambda: _causal("GPTNeoXForCausalLM", "GPTNeoXConfig"),
            "GPT-J": lambda: _causal("GPTJForCausalLM", "GPTJConfig"),
            "OPT": lambda: _causal("OPTForCausalLM", "OPTConfig"),
            "BLOOM": lambda: _causal("BloomForCausalLM", "BloomConfig"),
            "Llama": lambda: _causal("LlamaForCausalLM", "LlamaConfig"),
            "Mistral": lambda: _causal("MistralForCausalLM", "MistralConfig"),
            "Qwen2": lambda: _causal("Qwen2ForCausalLM", "Qwen2Config"),
            "Qwen3": lambda: _causal("Qwen3ForCausalLM", "Qwen3Config"),
            "Gemma": lambda: _causal("GemmaForCausalLM", "GemmaConfig"),
            "Gemma 2": lambda: _causal("Gemma2ForCausalLM", "Gemma2Config"),
            "Phi": lambda: _causal("PhiForCausalLM", "PhiConfig"),
            "Phi-3": lambda: _causal("Phi3ForCausalLM", "Phi3Config"),
            "StableLM": lambda: _causal("StableLmForCausalLM", "StableLmConfig"),
            "Falcon": lambda: _causal("FalconForCausalLM", "FalconConfig"),
            "MPT": lambda: _causal("MptForCausalLM", "MptConfig", max_seq_len=64),
            "CodeGen": lambda: _causal("CodeGenForCausalLM", "CodeGenConfig"),
            "OLMo": lambda: _causal("OlmoForCausalLM", "OlmoConfig"),
            "Cohere": lambda: _causal("CohereForCausalLM", "CohereConfig"),
            "StarCoder2": lambda: _causal("Starcoder2ForCausalLM", "Starcoder2Config"),
            "Granite": lambda: _causal("GraniteForCausalLM", "GraniteConfig"),
        },
        "mixture of experts": {
            "Mixtral": lambda: _causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
            "Qwen2-MoE": lambda: _causal(
                "Qwen2MoeForCausalLM", "Qwen2MoeConfig", num_experts=4, moe_intermediate_size=32,
                shared_expert_intermediate_size=32),
        },
        "state space": {
            "Mamba": lambda: _causal("MambaForCausalLM", "MambaConfig", state_size=4),
            "RWKV": lambda: _causal("RwkvForCausalLM", "RwkvConfig", attention_hidden_size=32),
        },
        "encoder": {
            "BERT": lambda: _encoder("BertForSequenceClassification", "BertConfig"),
            "RoBERTa": lambda: _encoder("RobertaForSequenceClassification", "RobertaConfig"),
            "ALBERT": lambda: _encoder("AlbertForSequenceClassification", "AlbertConfig"),
            "DistilBERT": lambda: _encoder("DistilBertForSequenceClassification", "DistilBertConfig"),
            "ELECTRA": lambda: _encoder("ElectraForSequenceClassification", "ElectraConfig"),
            "DeBERTa-v2": lambda: _encoder("DebertaV2ForSequenceClassification", "DebertaV2Config"),
            "MPNet": lambda: _encoder("MPNetForSequenceClassification", "MPNetConfig"),
            "ModernBERT": lambda: _encoder("ModernBertForSequenceClassification", "ModernBertConfig"),
        },
        "encoder-decoder": {
            "T5": lambda: _translator("T5ForConditionalGeneration", "T5Config"),
            "BART": lambda: _translator("BartForConditionalGeneration", "BartConfig"),
            "Pegasus": lambda: _translator("PegasusForConditionalGeneration", "PegasusConfig"),
            "mBART": lambda: _translator("MBartForConditionalGeneration", "MBartConfig"),
        },
        "vision": {
            "ViT": lambda: _seer("ViTForImageClassification", "ViTConfig"),
            "DeiT": lambda: _seer("DeiTForImageClassification", "DeiTConfig"),
            "BEiT": lambda: _seer("BeitForImageClassification", "BeitConfig"),
            "DINOv2": lambda: _seer("Dinov2ForImageClassification", "Dinov2Config"),
            "Swin (HF)": lambda: _seer(
                "SwinForImageClassification", "SwinConfig", patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
                window_size=4),
            "ConvNeXt (HF)": lambda: _seer(
                "ConvNextForImageClassification", "ConvNextConfig", size=64, patch_size=4, hidden_sizes=[8, 16, 32, 32],
                depths=[1, 1, 1, 1]),
        },
        "contrastive": {
            "CLIP": lambda: _contrastive("CLIPModel", "CLIPConfig"),
        },
        "timm": {
            "resnet10t": lambda: _timm("resnet10t"),
            "mobilenetv3_small_050": lambda: _timm("mobilenetv3_small_050"),
            "efficientnet_lite0": lambda: _timm("efficientnet_lite0"),
            "convnext_atto": lambda: _timm("convnext_atto"),
            "vit_tiny_patch16_224": lambda: _timm("vit_tiny_patch16_224", img_size=64, depth=2),
            "mixer_s32_224": lambda: _timm("mixer_s32_224", img_size=64),
            "regnetx_002": lambda: _timm("regnetx_002"),
            "cait_xxs24_224": lambda: _timm("cait_xxs24_224", img_size=64, depth=2),
            "poolformer_s12": lambda: _timm("poolformer_s12"),
            "edgenext_xx_small": lambda: _timm("edgenext_xx_small"),
            "ghostnet_050": lambda: _timm("ghostnet_050"),
            "levit_128s": lambda: _timm("levit_128s", size=224),
        },
        "torchvision": {
            "resnet18": lambda: _torchvision("resnet18"),
            "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
            "shufflenet_v2_x0_5": lambda: _torchvision("shufflenet_v2_x0_5"),
            "squeezenet1_1": lambda: _torchvision("squeezenet1_1"),
            "mnasnet0_5": lambda: _torchvision("mnasnet0_5"),
            "efficientnet_b0": lambda: _torchvision("efficientnet_b0"),
            "swin_t": lambda: _torchvision("swin_t"),
            "lraspp_mobilenet_v3_large": lambda: _segmenter("lraspp_mobilenet_v3_large"),
            "fcn_resnet50": lambda: _segmenter("fcn_resnet50"),
            "retinanet_resnet50_fpn": lambda: _detector("retinanet_resnet50_fpn"),
        },
        "adapters (peft)": {
            "GPT-2 + LoRA": lambda: _adapted(
                _causal("GPT2LMHeadModel", "GPT2Config"), "LoraConfig", r=4, target_modules=["c_attn", "c_fc"],
                fan_in_fan_out=True),
            "Llama + LoRA": lambda: _adapted(
                _causal("LlamaForCausalLM", "LlamaConfig"), "LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
            "Llama + IA3": lambda: _adapted(
                _causal("LlamaForCausalLM", "LlamaConfig"), "IA3Config", target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"]),
            "BERT + LoRA": lambda: _adapted(
                _encoder("BertForSequenceClassification", "BertConfig"), "LoraConfig", r=4,
                target_modules=["query", "value"], modules_to_save=["classifier"]),
        },
        "diffusion (diffusers)": {
            "UNet2D": lambda: _denoiser(
                "UNet2DModel", layers_per_block=1, block_out_channels=(16, 32), attention_head_dim=8,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
            "UNet2D with text": lambda: _denoiser(
                "UNet2DConditionModel", text=True, layers_per_block=1, block_out_channels=(16, 32),
                attention_head_dim=4, cross_attention_dim=32,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
        },
    }.items()
    for name, make in tasks.items()
}  # fmt: skip
