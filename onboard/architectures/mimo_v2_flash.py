"""MiMo-V2-Flash: sliding-window layers with attention sinks, few full ones, experts, three MTP layers."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"mimo_v2_flash": "MiMoV2FlashForCausalLM"},
    # hybrid_layer_pattern is 1 where a layer slides; MTP layers slide and have a dense MLP.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size  if not hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.k_proj.weight          num_key_value_heads * head_dim, hidden_size  if not hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.v_proj.weight          num_key_value_heads * v_head_dim, hidden_size  if not hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * v_head_dim  if not hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.attention_sink_bias    num_attention_heads  if add_full_attention_sink_bias and not hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.q_proj.weight          swa_num_attention_heads * swa_head_dim, hidden_size  if hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.k_proj.weight          swa_num_key_value_heads * swa_head_dim, hidden_size  if hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.v_proj.weight          swa_num_key_value_heads * swa_v_head_dim, hidden_size  if hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, swa_num_attention_heads * swa_v_head_dim  if hybrid_layer_pattern[layer]
    attention  model.layers.{layer}.self_attn.attention_sink_bias    swa_num_attention_heads  if add_swa_attention_sink_bias and hybrid_layer_pattern[layer]
    mlp        model.layers.{layer}.mlp.{gate,up}_proj.weight        intermediate_size, hidden_size  if not moe_layer_freq[layer]
    mlp        model.layers.{layer}.mlp.down_proj.weight             hidden_size, intermediate_size  if not moe_layer_freq[layer]
    router     model.layers.{layer}.mlp.gate.weight                  n_routed_experts, hidden_size  if moe_layer_freq[layer]
    bias       model.layers.{layer}.mlp.gate.e_score_correction_bias  n_routed_experts  if moe_layer_freq[layer]
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if moe_layer_freq[layer]
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if moe_layer_freq[layer]
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.mtp.layers.{mtp}.{enorm,hnorm,input_layernorm,pre_mlp_layernorm,final_layernorm}.weight  hidden_size
    mtp        model.mtp.layers.{mtp}.eh_proj.weight                 hidden_size, 2 * hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.q_proj.weight        swa_num_attention_heads * swa_head_dim, hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.k_proj.weight        swa_num_key_value_heads * swa_head_dim, hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.v_proj.weight        swa_num_key_value_heads * swa_v_head_dim, hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.o_proj.weight        hidden_size, swa_num_attention_heads * swa_v_head_dim
    mtp        model.mtp.layers.{mtp}.self_attn.attention_sink_bias  swa_num_attention_heads  if add_swa_attention_sink_bias
    mtp        model.mtp.layers.{mtp}.mlp.{gate,up}_proj.weight      intermediate_size, hidden_size
    mtp        model.mtp.layers.{mtp}.mlp.down_proj.weight           hidden_size, intermediate_size
    """,
    # What transformers 5 saves, and the fused attention of MiMo-V2.5.
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            n_routed_experts, hidden_size, moe_intermediate_size
    attention  model.layers.{layer}.self_attn.sinks                  swa_num_attention_heads
    attention  model.layers.{layer}.self_attn.qkv_proj.weight        0
    mtp        model.mtp.layers.{mtp}.self_attn.qkv_proj.weight      0
    """,
    defaults={
        "add_full_attention_sink_bias": "False",
        "add_swa_attention_sink_bias": "False",
        "num_nextn_predict_layers": "3",  # in the files, not in the config
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts", "mtp": "num_nextn_predict_layers"},
    # No NVFP4 is published; as in its neighbours, attention, router, MTP and lm_head stay. The FP8
    # source leaves o_proj alone too.
    quantize=(Role.EXPERT, Role.MLP),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # Per token in every layer; sliding layers stop growing at sliding_window.
    cache="swa_num_key_value_heads * (swa_head_dim + swa_v_head_dim) if hybrid_layer_pattern[layer]"
    " else num_key_value_heads * (head_dim + v_head_dim)",
    small={
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    engine=Engine(minimum="0.14.0", tool_call_parser="mimo", reasoning_parser="mimo"),
    origin="transformers 5.24 MiMoV2FlashForCausalLM and its conversion; MTP names: vLLM 0.32 "
    "mimo_v2_mtp.py; source: XiaomiMiMo/MiMo-V2-Flash (block FP8)",
    traps=(
        "Keys are 192 wide, values 128: o_proj reads heads * v_head_dim.",
        "The config does not announce the three MTP layers; vLLM drafts with the first only.",
        "Sliding layers have twice the key-value heads of full ones, and attention sinks.",
        "Values are scaled by attention_value_scale.",
    ),
)
