"""ERNIE 4.5 with experts: a correction bias in the router, shared experts in the small model, MTP."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    router     model.layers.{layer}.mlp.gate.weight                  moe_num_experts, hidden_size  if layer in moe_layers
    bias       model.layers.{layer}.mlp.moe_statics.e_score_correction_bias  1, moe_num_experts  if layer in moe_layers
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer in moe_layers
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer in moe_layers
    shared_expert  model.layers.{layer}.mlp.shared_experts.{gate,up}_proj.weight  moe_intermediate_size * moe_num_shared_experts, hidden_size  if moe_num_shared_experts and layer in moe_layers
    shared_expert  model.layers.{layer}.mlp.shared_experts.down_proj.weight  hidden_size, moe_intermediate_size * moe_num_shared_experts  if moe_num_shared_experts and layer in moe_layers
    mlp        model.layers.{layer}.mlp.{gate,up}_proj.weight        intermediate_size, hidden_size  if layer not in moe_layers
    mlp        model.layers.{layer}.mlp.down_proj.weight             hidden_size, intermediate_size  if layer not in moe_layers
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.mtp_{emb,hidden}_norm.{mtp}.weight              hidden_size
    mtp        model.mtp_linear_proj.{mtp}.weight                    hidden_size, 2 * hidden_size
    mtp        model.mtp_block.{mtp}.{input,post_attention}_layernorm.weight  hidden_size
    mtp        model.mtp_block.{mtp}.self_attn.q_proj.weight         num_attention_heads * head_dim, hidden_size
    mtp        model.mtp_block.{mtp}.self_attn.{k,v}_proj.weight     num_key_value_heads * head_dim, hidden_size
    mtp        model.mtp_block.{mtp}.self_attn.o_proj.weight         hidden_size, num_attention_heads * head_dim
    mtp        model.mtp_block.{mtp}.mlp.{gate,up}_proj.weight       intermediate_size, hidden_size
    mtp        model.mtp_block.{mtp}.mlp.down_proj.weight            hidden_size, intermediate_size
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         moe_num_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            moe_num_experts, hidden_size, moe_intermediate_size
    bias       model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias  1, moe_num_experts
    bias       model.layers.{layer}.self_attn.{q,k,v,o}_proj.bias    0
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
        "moe_num_shared_experts": "0",
        "moe_layer_start_index": "1",
        "moe_layer_interval": "1",
        "last_moe_layer": "num_hidden_layers - 1"
        ' if config.get("moe_layer_end_index") in (None, -1) else moe_layer_end_index',
        # Layers whose number + 1 is a multiple of the interval, from the first to the last.
        "moe_layers": "range(moe_layer_start_index"
        " + (-moe_layer_start_index - 1) % moe_layer_interval, last_moe_layer + 1,"
        " moe_layer_interval)",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "True",
    },
    ranges={"expert": "moe_num_experts", "mtp": "num_nextn_predict_layers"},
    experts_per_token="moe_k",
    # No NVFP4 is published; as in its neighbours, attention, shared experts, MTP and lm_head stay.
    quantize=(Role.EXPERT, Role.MLP),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    small={"moe_num_experts": 8, "moe_k": 2, "moe_layer_end_index": -1},
    engine=Engine(
        minimum="0.10.0",
        tool_call_parser="ernie45",
        reasoning_parser="ernie45",
        cpu="vLLM's CPU router leaves out the correction bias of a softmax router",
    ),
    origin="transformers 5.24 Ernie4_5_MoeForCausalLM and its conversion; MTP names: vLLM 0.32 "
    "ernie_mtp.py; baidu/ERNIE-4.5-21B-A3B-PT, ERNIE-4.5-300B-A47B-PT",
    traps=(
        "The router's matrix is stored in fp32.",
        "transformers drops mtp_* without a word.",
        "moe_num_experts, moe_k: the config's keys have their own names.",
    ),
)
