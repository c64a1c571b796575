"""MiniMax-M2: full attention and many small experts behind a sigmoid router."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"minimax_m2": "MiniMaxM2ForCausalLM"},
    # Query and key norms span all heads at once.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    norm       model.layers.{layer}.self_attn.q_norm.weight          num_attention_heads * head_dim  if use_qk_norm
    norm       model.layers.{layer}.self_attn.k_norm.weight          num_key_value_heads * head_dim  if use_qk_norm
    router     model.layers.{layer}.block_sparse_moe.gate.weight     num_local_experts, hidden_size
    bias       model.layers.{layer}.block_sparse_moe.e_score_correction_bias  num_local_experts  if use_routing_bias
    expert     model.layers.{layer}.block_sparse_moe.experts.{expert}.{w1,w3}.weight  intermediate_size, hidden_size
    expert     model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight  hidden_size, intermediate_size
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    """,
    # What transformers 5 saves.
    also="""
    router     model.layers.{layer}.mlp.gate.weight                  num_local_experts, hidden_size
    bias       model.layers.{layer}.mlp.e_score_correction_bias      num_local_experts
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         num_local_experts, 2 * intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            num_local_experts, hidden_size, intermediate_size
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "use_qk_norm": "True",
        "use_routing_bias": "True",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "num_local_experts"},
    # nvidia/MiniMax-M2.5-NVFP4 and M2.7 keep self_attn, the gate and lm_head.
    quantize=(Role.EXPERT,),
    siblings=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
    fused_experts={"gate_up_proj": Fused(("w1", "w3")), "down_proj": Fused(("w2",))},
    mtp_layers="0",  # config.json announces num_mtp_modules, the published files hold none
    small={"rotary_dim": 16},
    engine=Engine(
        minimum="0.11.1",
        tool_call_parser="minimax_m2",
        reasoning_parser="minimax_m2_append_think",
        cpu="vLLM's CPU experts lack the sigmoid router without groups",
    ),
    origin="transformers 5.24 MiniMaxM2ForCausalLM with its mixtral conversion; vLLM 0.32 "
    "minimax_m2.py; NVFP4: nvidia/MiniMax-M2.5-NVFP4",
    traps=(
        "use_mtp and num_mtp_modules promise MTP layers that the published files do not hold.",
        "The source is block FP8 (weight_scale_inv, 128 x 128).",
        "w1 is gate, w3 is up, w2 is down.",
        "intermediate_size is the width of one expert.",
    ),
)
