"""Tiny models with random weights, of nearly every architecture in mlx-lm.

FIELDS gives the value of a field by name, whichever architecture has it; CONFIGS adds what one architecture needs.
A name `model/variant` is another config of the same model.
"""

import dataclasses
import importlib
import pkgutil

import mlx.core as mx
import mlx_lm.models
import msl
from mlx.utils import tree_map

VOCABULARY = 256
FULL, SLIDING = "full_attention", "sliding_attention"
ALTERNATING = [SLIDING, FULL] * 2
ROPE = {"type": "default", "rope_type": "default", "rope_theta": 1e4}
ROPE_LLAMA4 = {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
ROPE_BY_TYPE = {FULL: {**ROPE, "partial_rotary_factor": 0.5}, SLIDING: ROPE}
ROPE_DYNAMIC = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
KIMI_LAYERS = {
    **{"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 32},
    **{"short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "gate_low_rank_dim": 16},
}


def _longrope(n):
    return {
        **{"type": "longrope", "short_factor": [1.0] * n, "long_factor": [1.0] * n},
        "original_max_position_embeddings": 512,
    }


def _nas_block(heads_in_group=None, no_op=False, linear=False):
    attention = {"n_heads_in_group": heads_in_group, "no_op": no_op, "replace_with_linear": linear}
    return {"attention": attention, "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False}}


# fmt: off
FIELDS = {
    # Sizes
    "vocab_size": VOCABULARY, "num_vocab": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size": 128,
    "d_model": 128, "n_embd": 128, "model_dim": 128, "block_dim": 128, "intermediate_size": 96,
    "shared_intermediate_size": 32, "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "global_head_dim": 64, "max_position_embeddings": 512, "model_max_length": 512, "n_positions": 512, "n_ctx": 512,
    "block_size": 128,
    # Attention
    "layer_types": ALTERNATING, "sliding_window": 8, "window_size": 8, "sliding_window_pattern": 2,
    "full_attention_interval": 2, "layer_group_size": 2, "query_pre_attn_scalar": 32, "use_qk_norm": True,
    "attention_bias": False, "rope_theta": 1e4, "rope_scaling": None, "rope_parameters": ROPE, "rotary_dim": 16,
    "partial_rotary_factor": 0.5, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8,
    # Recurrent layers
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "state_size": 16, "group_norm_size": 1, "conv_kernel": 4, "conv_L_cache": 3, "conv_bias": False,
    "use_conv_bias": True, "use_bias": False,
    # Experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_type": "identity", "zero_expert_num": 2,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    # The rest
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5, "norm_epsilon": 1e-5, "post_norm_eps": 1e-5, "hidden_act": "silu", "mlp_bias": False,
    "tie_word_embeddings": False, "logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "num_nextn_predict_layers": 0, "dim_model_base": 64, "scale_depth": 1.4,
    "scale_emb": 12,
}

# These keep the default of an architecture that has one, other than None or a number.
KEEP_DEFAULT = ("rope_scaling", "layer_types", "topk_method", "scoring_func", "partial_rotary_factor",
                "rope_parameters")

# "text" names the dataclass of a nested text_config, to which the other entries then belong.
CONFIGS = {
    "afm7": {"hidden_dim": 128, "num_kv_reuse_layers": 2, "num_kv_heads": 2},
    "afmoe": {"num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "bailing_moe": {"partial_rotary_factor": 1.0},
    "bailing_moe_linear": {"partial_rotary_factor": 0.5},
    "bailing_moe_v3": {"short_conv_kernel_size": 4, "rope_interleave": True},
    "cohere": {"num_key_value_heads": 4},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy",
                    "rope_scaling": {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4},
    "deepseek_v41": {"o_groups": 2, "o_lora_rank": 16, "compress_ratios": (0, 4, 4, 0), "kv_source_layer_ids": (1, 2),
                     "index_source_layer_ids": (1, 2), "index_topk": 4, "candidate_topk_blocks": 2, "hc_mult": 2,
                     "hc_sinkhorn_iters": 4, "scoring_func": "sqrtsoftplus"},
    "dots1": {"head_dim": None},
    "exaone4": {"sliding_window_pattern": "LLGL"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 32, "mamba_n_heads": 2},
    "gear": {"layer_types": ["conv_mixer", FULL, SLIDING, FULL], "hidden_activation": "gelu_pytorch_tanh"},
    "gear/softcap": {"layer_types": ["conv_mixer", FULL, SLIDING, FULL], "attn_logit_softcapping": 30.0},
    "gemma3": {"text": "gemma3_text.ModelArgs", "num_hidden_layers": 6, "sliding_window_pattern": 3},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window_pattern": 3},
    "gemma3n": {"text": "gemma3n.TextConfig", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                "layer_types": [SLIDING, FULL] * 3, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0,
                "activation_sparsity_pattern": [0.5] * 6, "hidden_size_per_layer_input": 32, "laurel_rank": 8,
                "altup_num_inputs": 2, "altup_coef_clip": 1.0, "altup_correct_scale": True, "altup_active_idx": 0},
    "gemma4": {"text": "gemma4_text.ModelArgs", "num_hidden_layers": 8, "num_kv_shared_layers": 4},
    "gemma4_text": {"num_hidden_layers": 8, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32,
                    "tie_word_embeddings": True, "partial_rotary_factor": 1.0},
    "gemma4_text/k_eq_v": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                           "num_global_key_value_heads": 1, "tie_word_embeddings": True,
                           "partial_rotary_factor": 1.0},
    "glm4_moe_lite": {"num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "gpt2": {"num_key_value_heads": None},
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "num_key_value_heads": None},
    "gpt_oss": {"layer_types": ALTERNATING},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 32,
                         "mamba_proj_bias": False, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": False},
    "hunyuan": {"num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": False, "cla_share_factor": 2,
                "rope_scaling": ROPE_DYNAMIC},
    "hunyuan/cla": {"num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
                    "rope_scaling": ROPE_DYNAMIC},
    "hunyuan_v1_dense": {"rope_scaling": ROPE_DYNAMIC},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
              "mamba_d_conv": 4, "mamba_expand": 2},
    "kimi_k25": {"text": "deepseek_v3.ModelArgs"},
    "kimi_k3": {"text": "kimi_k3.TextArgs", "linear_attn_config": KIMI_LAYERS},
    "kimi_linear": {"num_key_value_heads": 4, "linear_attn_config": KIMI_LAYERS, "mla_use_nope": True},
    "kimi_vl": {"text": "kimi_vl.TextArgs"},
    "Klear": {"num_key_value_heads": 4, "mlp_only_layers": [0]},
    "laguna": {"layer_types": [FULL] + [SLIDING] * 3, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
               "num_attention_heads_per_layer": [4] * 4, "rope_parameters": ROPE_BY_TYPE},
    "lfm2": {"block_ff_dim": 96, "block_multiple_of": 4, "block_ffn_dim_multiplier": 2.0,
             "block_auto_adjust_ff_dim": True, "layer_types": [FULL, "conv"] * 2},
    "lfm2-vl": {"text": "lfm2.ModelArgs", "block_ff_dim": 96, "block_multiple_of": 4, "block_ffn_dim_multiplier": 2.0,
                "block_auto_adjust_ff_dim": True, "layer_types": [FULL, "conv"] * 2},
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1, "layer_types": [FULL, "conv"] * 2},
    "lille-130m": {"n_kv_heads": 4},
    "llama": {"sliding_window": None, "layer_types": None},
    "llama/sliding": {"layer_types": ALTERNATING},
    "llama4": {"text": "llama4.TextArgs", "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
               "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA"},
    "mamba": {"time_step_rank": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1, "time_step_limit": (0.0, 100.0), "time_step_rank": "auto",
               "intermediate_size": 256, "ssm_state_size": 16},
    "mellum": {"rope_parameters": ROPE_BY_TYPE},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "v_head_dim": 16,
                      "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": True,
                      "sliding_window_size": 8, "swa_rope_theta": 1e4, "swa_num_attention_heads": 4,
                      "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 16},
    "minicpm3": {"num_key_value_heads": 4, "rope_scaling": _longrope(8)},
    "minimax_m3_vl": {"text": "minimax_m3_vl.TextArgs", "layer_types": [FULL, "minimax_m3_sparse"] * 2,
                      "moe_layer_freq": None, "dense_intermediate_size": 96, "index_block_size": 4,
                      "index_topk_blocks": 2},
    "ministral3": {"layer_types": ALTERNATING, "rope_parameters": ROPE_LLAMA4},
    "mistral3": {"text": "ministral3.ModelArgs", "rope_parameters": ROPE_LLAMA4},
    "mistral4": {"num_key_value_heads": 4, "head_dim": None, "rope_parameters": ROPE_LLAMA4},
    "muse_glimmer": {"layer_types": ALTERNATING, "layer_rope_theta": [1e4, 0, 1e4, 0]},
    "muse_spark": {"text": "muse_spark.TextArgs", "layer_rope_theta": [1e4, 0, 1e4, 0], "num_shared_experts": 0,
                   "moe_hidden_size": 64, "final_logit_softcapping": 20.0, "output_multiplier": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_nas_block(2), _nas_block(no_op=True), _nas_block(linear=True), _nas_block(4)]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_proj_bias": False, "ssm_state_size": 16,
                   "n_groups": 2, "hybrid_override_pattern": ["*", "M", "*", "-"], "time_step_limit": (0.0, 100.0),
                   "moe_intermediate_size": None, "n_routed_experts": None, "layer_types": None},
    "olmo3": {"layer_types": ALTERNATING},
    "olmo_hybrid": {"layer_types": ["linear_attention", FULL] * 2},
    "openelm": {"num_transformer_layers": 4, "ffn_dim_divisor": 16, "num_query_heads": [4] * 4,
                "num_kv_heads": [2] * 4, "ffn_multipliers": [1.0] * 4},
    "phi3": {"partial_rotary_factor": 1.0},
    "phi3small": {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
                  "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 4, "blocksparse_vert_stride": 2},
    "phimoe": {"rope_scaling": {**_longrope(16), "short_mscale": 1.2, "long_mscale": 1.2}},
    "pixtral": {"text": "llama.ModelArgs", "sliding_window": None},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 32, "mamba_num_heads": 4, "attention_window_size": 64,
               "full_attention_idx": None},
    "prism_hadamard_qwen35": {
        "text": "qwen3_5.TextModelArgs", "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}]},
    "qwen": {"kv_channels": 32, "intermediate_size": 192},
    "qwen2_vl": {"text": "qwen2.ModelArgs"},
    "qwen3_5": {"text": "qwen3_5.TextModelArgs"},
    "qwen3_5_moe": {"text": "qwen3_5.TextModelArgs"},
    "qwen3_vl": {"text": "qwen3.ModelArgs"},
    "qwen3_vl_moe": {"text": "qwen3_moe.ModelArgs"},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 16,
                        "block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "smollm3": {"sliding_window": None, "layer_types": None},
    "spark2_5": {"layer_types": ALTERNATING, "rope_parameters": ROPE_BY_TYPE, "hidden_act": "gelu"},
    "stablelm": {"use_qkv_bias": False},
    "step3p5": {"num_attention_groups": 2, "layer_types": ALTERNATING, "moe_top_k": 2, "share_expert_dim": 32,
                "moe_layers_enum": "1,2,3",
                "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2}},
    "youtu_llm": {"num_key_value_heads": 4},
}
# fmt: on

# Modules that are not models, and models that do not run in mlx-lm, whatever the cache.
PARTS = "activations base bitlinear_layers cache gated_delta mla pipeline rope_utils ssm switch_layers".split()
BROKEN = {"olmo": "needs another package, and adds its mask as text to the scores of a prompt"}
# Their layers are Metal kernels of mlx-lm's own: elsewhere the runner in msl runs these on the CPU.
METAL = ("bitnet", "muse_spark")


def names():
    """Every model that can be built here, and the variants."""
    found = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    variants = {name for name in CONFIGS if "/" in name and name.split("/")[0] in found}
    return sorted((found | variants) - {*PARTS, *BROKEN}, key=str.lower)


def _fill(cls, settings):
    out = {}
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        plain = field.default in (None, dataclasses.MISSING) or isinstance(field.default, int | float)
        if field.name in settings:
            out[field.name] = settings[field.name]
        elif field.name in FIELDS and (required or (plain and field.name not in KEEP_DEFAULT)):
            out[field.name] = FIELDS[field.name]
    return out


def build(name, seed=0):
    """The model with float32 weights, drawn with `seed`; what starts as zeros is drawn too."""
    module_name = name.split("/")[0]
    if module_name in METAL and not mx.metal.is_available():
        msl.install()
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    settings = dict(CONFIGS.get(name, {}))
    text = settings.pop("text", None)
    config = {**_fill(module.ModelArgs, settings), "model_type": module_name}
    if text is not None:
        text_module, text_class = text.split(".")
        text_class = getattr(importlib.import_module(f"mlx_lm.models.{text_module}"), text_class)
        config["text_config"] = {**_fill(text_class, settings), "model_type": text_module}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    if module_name == "phi3small":
        model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])  # else ids above 100,000

    def draw(x):
        zeros = mx.issubdtype(x.dtype, mx.floating) and not x.any().item()
        return mx.random.normal(x.shape, x.dtype) * 0.02 if zeros else x

    model.update(tree_map(draw, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model
