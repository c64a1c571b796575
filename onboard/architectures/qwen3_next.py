"""Qwen3-Next: gated delta-net layers with gated full attention every fourth, and many experts."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"qwen3_next": "Qwen3NextForCausalLM"},
    # Queries come with an output gate of the same width: q_proj is twice as tall.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          2 * num_attention_heads * head_dim, hidden_size  if layer_types[layer] == "full_attention"
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size  if layer_types[layer] == "full_attention"
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim  if layer_types[layer] == "full_attention"
    norm       model.layers.{layer}.self_attn.{q,k}_norm.weight      head_dim  if layer_types[layer] == "full_attention"
    state      model.layers.{layer}.linear_attn.in_proj_qkvz.weight  2 * linear_keys + 2 * linear_values, hidden_size  if layer_types[layer] == "linear_attention"
    state      model.layers.{layer}.linear_attn.in_proj_ba.weight    2 * linear_num_value_heads, hidden_size  if layer_types[layer] == "linear_attention"
    state      model.layers.{layer}.linear_attn.conv1d.weight        2 * linear_keys + linear_values, 1, linear_conv_kernel_dim  if layer_types[layer] == "linear_attention"
    state      model.layers.{layer}.linear_attn.{A_log,dt_bias}      linear_num_value_heads  if layer_types[layer] == "linear_attention"
    norm       model.layers.{layer}.linear_attn.norm.weight          linear_value_head_dim  if layer_types[layer] == "linear_attention"
    state      model.layers.{layer}.linear_attn.out_proj.weight      hidden_size, linear_values  if layer_types[layer] == "linear_attention"
    router     model.layers.{layer}.mlp.gate.weight                  num_experts, hidden_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    router     model.layers.{layer}.mlp.shared_expert_gate.weight    1, hidden_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    shared_expert  model.layers.{layer}.mlp.shared_expert.{gate,up}_proj.weight  shared_expert_intermediate_size, hidden_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    shared_expert  model.layers.{layer}.mlp.shared_expert.down_proj.weight  hidden_size, shared_expert_intermediate_size  if layer not in mlp_only_layers and (layer + 1) % decoder_sparse_step == 0
    mlp        model.layers.{layer}.mlp.{gate,up}_proj.weight        intermediate_size, hidden_size  if layer in mlp_only_layers or (layer + 1) % decoder_sparse_step
    mlp        model.layers.{layer}.mlp.down_proj.weight             hidden_size, intermediate_size  if layer in mlp_only_layers or (layer + 1) % decoder_sparse_step
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        mtp.fc.weight                                         hidden_size, 2 * hidden_size  if num_nextn_predict_layers
    mtp        mtp.{norm,pre_fc_norm_embedding,pre_fc_norm_hidden}.weight  hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.{mtp}.{input,post_attention}_layernorm.weight  hidden_size
    mtp        mtp.layers.{mtp}.self_attn.q_proj.weight              2 * num_attention_heads * head_dim, hidden_size
    mtp        mtp.layers.{mtp}.self_attn.{k,v}_proj.weight          num_key_value_heads * head_dim, hidden_size
    mtp        mtp.layers.{mtp}.self_attn.o_proj.weight              hidden_size, num_attention_heads * head_dim
    mtp        mtp.layers.{mtp}.self_attn.{q,k}_norm.weight          head_dim
    mtp        mtp.layers.{mtp}.mlp.gate.weight                      num_experts, hidden_size
    mtp        mtp.layers.{mtp}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size
    mtp        mtp.layers.{mtp}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size
    mtp        mtp.layers.{mtp}.mlp.shared_expert_gate.weight        1, hidden_size
    mtp        mtp.layers.{mtp}.mlp.shared_expert.{gate,up}_proj.weight  shared_expert_intermediate_size, hidden_size
    mtp        mtp.layers.{mtp}.mlp.shared_expert.down_proj.weight   hidden_size, shared_expert_intermediate_size
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         num_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            num_experts, hidden_size, moe_intermediate_size
    bias       model.layers.{layer}.self_attn.{q,k,v,o}_proj.bias    0
    """,
    defaults={
        # The published config names every fourth layer by an interval, transformers 5 lists them.
        "full_attention_interval": "4",
        "layer_types": '(["linear_attention"] * (full_attention_interval - 1) + ["full_attention"])'
        " * (num_hidden_layers // full_attention_interval + 1)",
        "linear_keys": "linear_num_key_heads * linear_key_head_dim",
        "linear_values": "linear_num_value_heads * linear_value_head_dim",
        "mlp_only_layers": "()",
        "decoder_sparse_step": "1",
        "num_nextn_predict_layers": "1",  # not in the published config; one layer is in the files
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "num_experts", "mtp": "num_nextn_predict_layers"},
    # Published lists differ: all leave gates, linear attention, lm_head and MTP alone; Qwen3.5's
    # also full attention and the shared expert, which is the careful choice made here.
    quantize=(Role.EXPERT, Role.MLP),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # The recurrent state of a linear layer does not grow with the tokens.
    cache='2 * num_key_value_heads * head_dim if layer_types[layer] == "full_attention" else 0',
    small={
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    engine=Engine(minimum="0.10.2", tool_call_parser="hermes", reasoning_parser="qwen3"),
    origin="transformers 5.24 Qwen3NextForCausalLM and its qwen2_moe conversion; MTP names: "
    "vLLM 0.32 qwen3_next_mtp.py; in_proj_qkvz and in_proj_ba are grouped by key head",
    traps=(
        "transformers ignores mtp.*: a checkpoint it saves has lost its draft layer.",
        "Norm weights are stored as offsets from one (1 + weight), but linear_attn.norm is not.",
        "in_proj_qkvz interleaves q, k, v and z per key head: rows are not four blocks.",
    ),
)
