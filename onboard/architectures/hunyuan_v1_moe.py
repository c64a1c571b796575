"""Hunyuan-A13B: experts and one shared MLP in every layer, norms on queries and keys."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"},
    # intermediate_size is the width of an expert and of the shared MLP alike. The published config
    # gives the counts per layer, as lists of one repeated number.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    norm       model.layers.{layer}.self_attn.{query,key}_layernorm.weight  head_dim
    router     model.layers.{layer}.mlp.gate.wg.weight               num_experts, hidden_size
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, intermediate_size
    shared_expert  model.layers.{layer}.mlp.shared_mlp.{gate,up}_proj.weight  intermediate_size, hidden_size
    shared_expert  model.layers.{layer}.mlp.shared_mlp.down_proj.weight  hidden_size, intermediate_size
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         num_experts, 2 * intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            num_experts, hidden_size, intermediate_size
    bias       model.layers.{layer}.self_attn.{q,k,v,o}_proj.bias    0
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "num_experts"},
    experts_per_token="moe_topk if moe_topk in range(1000) else moe_topk[0]",
    mtp_layers="0",
    # No NVFP4 is published; as in its neighbours, attention, shared MLP and lm_head stay.
    quantize=(Role.EXPERT,),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    small={"moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": 128},
    engine=Engine(
        minimum="0.10.0", tool_call_parser="hunyuan_a13b", reasoning_parser="hunyuan_a13b"
    ),
    origin="transformers 5.24 HunYuanMoEV1ForCausalLM with its qwen2_moe conversion; "
    "vLLM 0.32 runs it through the transformers backend; tencent/Hunyuan-A13B-Instruct",
    traps=(
        "moe_topk, num_shared_expert and moe_intermediate_size are lists with one entry per layer.",
        "The router's matrix (gate.wg) is fp32.",
    ),
)
