"""Qwen3.5 and Qwen3.6, with experts and dense: gated delta-net layers, a vision tower, MTP."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    },
    roots={
        "qwen3_5": "model.language_model",
        "qwen3_5_text": "model",
        "qwen3_5_moe": "model.language_model",
        "qwen3_5_moe_text": "model",
    },
    text_config="text_config",
    # Queries come with an output gate of the same width: q_proj is twice as tall.
    tensors="""
    embed      {root}.embed_tokens.weight                            vocab_size, hidden_size
    norm       {root}.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  {root}.layers.{layer}.self_attn.q_proj.weight         2 * num_attention_heads * head_dim, hidden_size  if layer_types[layer] == "full_attention"
    attention  {root}.layers.{layer}.self_attn.{k,v}_proj.weight     num_key_value_heads * head_dim, hidden_size  if layer_types[layer] == "full_attention"
    attention  {root}.layers.{layer}.self_attn.o_proj.weight         hidden_size, num_attention_heads * head_dim  if layer_types[layer] == "full_attention"
    norm       {root}.layers.{layer}.self_attn.{q,k}_norm.weight     head_dim  if layer_types[layer] == "full_attention"
    state      {root}.layers.{layer}.linear_attn.in_proj_qkv.weight  2 * linear_keys + linear_values, hidden_size  if layer_types[layer] == "linear_attention"
    state      {root}.layers.{layer}.linear_attn.in_proj_z.weight    linear_values, hidden_size  if layer_types[layer] == "linear_attention"
    state      {root}.layers.{layer}.linear_attn.in_proj_{a,b}.weight  linear_num_value_heads, hidden_size  if layer_types[layer] == "linear_attention"
    state      {root}.layers.{layer}.linear_attn.conv1d.weight       2 * linear_keys + linear_values, 1, linear_conv_kernel_dim  if layer_types[layer] == "linear_attention"
    state      {root}.layers.{layer}.linear_attn.{A_log,dt_bias}     linear_num_value_heads  if layer_types[layer] == "linear_attention"
    norm       {root}.layers.{layer}.linear_attn.norm.weight         linear_value_head_dim  if layer_types[layer] == "linear_attention"
    state      {root}.layers.{layer}.linear_attn.out_proj.weight     hidden_size, linear_values  if layer_types[layer] == "linear_attention"
    router     {root}.layers.{layer}.mlp.gate.weight                 num_experts, hidden_size  if num_experts
    expert     {root}.layers.{layer}.mlp.experts.gate_up_proj        num_experts, 2 * moe_intermediate_size, hidden_size  if num_experts
    expert     {root}.layers.{layer}.mlp.experts.down_proj           num_experts, hidden_size, moe_intermediate_size  if num_experts
    router     {root}.layers.{layer}.mlp.shared_expert_gate.weight   1, hidden_size  if num_experts
    shared_expert  {root}.layers.{layer}.mlp.shared_expert.{gate,up}_proj.weight  shared_expert_intermediate_size, hidden_size  if num_experts
    shared_expert  {root}.layers.{layer}.mlp.shared_expert.down_proj.weight  hidden_size, shared_expert_intermediate_size  if num_experts
    mlp        {root}.layers.{layer}.mlp.{gate,up}_proj.weight       intermediate_size, hidden_size  if not num_experts
    mlp        {root}.layers.{layer}.mlp.down_proj.weight            hidden_size, intermediate_size  if not num_experts
    norm       {root}.norm.weight                                    hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        mtp.fc.weight                                         hidden_size, 2 * hidden_size  if mtp_num_hidden_layers
    mtp        mtp.{norm,pre_fc_norm_embedding,pre_fc_norm_hidden}.weight  hidden_size  if mtp_num_hidden_layers
    mtp        mtp.layers.{mtp}.{input,post_attention}_layernorm.weight  hidden_size
    mtp        mtp.layers.{mtp}.self_attn.q_proj.weight              2 * num_attention_heads * head_dim, hidden_size
    mtp        mtp.layers.{mtp}.self_attn.{k,v}_proj.weight          num_key_value_heads * head_dim, hidden_size
    mtp        mtp.layers.{mtp}.self_attn.o_proj.weight              hidden_size, num_attention_heads * head_dim
    mtp        mtp.layers.{mtp}.self_attn.{q,k}_norm.weight          head_dim
    mtp        mtp.layers.{mtp}.mlp.gate.weight                      num_experts, hidden_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.shared_expert_gate.weight        1, hidden_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.shared_expert.{gate,up}_proj.weight  shared_expert_intermediate_size, hidden_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.shared_expert.down_proj.weight   hidden_size, shared_expert_intermediate_size  if num_experts
    mtp        mtp.layers.{mtp}.mlp.{gate,up}_proj.weight            intermediate_size, hidden_size  if not num_experts
    mtp        mtp.layers.{mtp}.mlp.down_proj.weight                 hidden_size, intermediate_size  if not num_experts
    vision     model.visual.patch_embed.proj.weight                  vision_config.hidden_size, vision_config.in_channels, vision_config.temporal_patch_size, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     model.visual.patch_embed.proj.bias                    vision_config.hidden_size  if vision_config
    vision     model.visual.pos_embed.weight                         vision_config.num_position_embeddings, vision_config.hidden_size  if vision_config
    vision     model.visual.blocks.{block}.norm{1,2}.{weight,bias}   vision_config.hidden_size
    vision     model.visual.blocks.{block}.attn.qkv.weight           3 * vision_config.hidden_size, vision_config.hidden_size
    vision     model.visual.blocks.{block}.attn.qkv.bias             3 * vision_config.hidden_size
    vision     model.visual.blocks.{block}.attn.proj.weight          vision_config.hidden_size, vision_config.hidden_size
    vision     model.visual.blocks.{block}.attn.proj.bias            vision_config.hidden_size
    vision     model.visual.blocks.{block}.mlp.linear_fc1.weight     vision_config.intermediate_size, vision_config.hidden_size
    vision     model.visual.blocks.{block}.mlp.linear_fc1.bias       vision_config.intermediate_size
    vision     model.visual.blocks.{block}.mlp.linear_fc2.weight     vision_config.hidden_size, vision_config.intermediate_size
    vision     model.visual.blocks.{block}.mlp.linear_fc2.bias       vision_config.hidden_size
    vision     model.visual.merger.norm.{weight,bias}                vision_config.hidden_size  if vision_config
    vision     model.visual.merger.linear_fc1.weight                 merged, merged  if vision_config
    vision     model.visual.merger.linear_fc1.bias                   merged  if vision_config
    vision     model.visual.merger.linear_fc2.weight                 vision_config.out_hidden_size, merged  if vision_config
    vision     model.visual.merger.linear_fc2.bias                   vision_config.out_hidden_size  if vision_config
    """,
    # One tensor per expert: FP8 and NVFP4 releases. Fused in the MTP layer: Qwen3.6.
    also="""
    expert     {root}.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size
    expert     {root}.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size
    mtp        mtp.layers.{mtp}.mlp.experts.gate_up_proj             num_experts, 2 * moe_intermediate_size, hidden_size
    mtp        mtp.layers.{mtp}.mlp.experts.down_proj                num_experts, hidden_size, moe_intermediate_size
    bias       {root}.layers.{layer}.self_attn.{q,k,v,o}_proj.bias   0
    """,
    defaults={
        "full_attention_interval": "4",
        "layer_types": '(["linear_attention"] * (full_attention_interval - 1) + ["full_attention"])'
        " * (num_hidden_layers // full_attention_interval + 1)",
        "linear_keys": "linear_num_key_heads * linear_key_head_dim",
        "linear_values": "linear_num_value_heads * linear_value_head_dim",
        "num_experts": "0",
        "mtp_num_hidden_layers": "0",
        "tie_word_embeddings": "False",
        "vision_config": "None",
        "merged": "vision_config.hidden_size * vision_config.spatial_merge_size ** 2"
        " if vision_config else 0",
    },
    ranges={
        "expert": "num_experts",
        "mtp": "mtp_num_hidden_layers",
        "block": 'getattr(vision_config, "depth", 0)',
    },
    mtp_layers="mtp_num_hidden_layers",
    # nvidia/Qwen3.5-397B-A17B and 122B-A10B quantize nothing but routed experts: linear_attn,
    # self_attn, shared_expert, its gate, visual, mtp and lm_head stay; mlp.gate too, which the
    # lists leave out because transformers 5 holds it as a parameter, not as a linear; and mtp.fc,
    # which the 397B list leaves out but the files hold in bf16.
    # nvidia/Qwen3.6 is mixed: dense mlp, shared_expert and lm_head become W4A16 NVFP4 as well,
    # attention FP8, in_proj_a and in_proj_b stay. We keep shared_expert and lm_head: they are
    # read for every token and small.
    quantize=(Role.EXPERT, Role.MLP),
    siblings=(
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_a", "in_proj_b"),
    ),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # The recurrent state of a linear layer does not grow with the tokens.
    cache='2 * num_key_value_heads * head_dim if layer_types[layer] == "full_attention" else 0',
    small={
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters.mrope_section": [2, 1, 1],
        "vision_config.depth": 2,
        "vision_config.hidden_size": 64,
        "vision_config.intermediate_size": 128,
        "vision_config.num_heads": 2,
        "vision_config.num_position_embeddings": 64,
        "vision_config.out_hidden_size": 128,
    },
    engine=Engine(
        minimum="0.17.0",
        tool_call_parser="qwen3_coder",
        reasoning_parser="qwen3",
        cpu="its class is multimodal and needs torchvision, which the CPU engine lacks",
    ),
    origin="transformers 5.24 Qwen3_5MoeForConditionalGeneration; MTP names: vLLM 0.32 "
    "qwen3_5_mtp.py; NVFP4: nvidia/Qwen3.5-397B-A17B-NVFP4, nvidia/Qwen3.6-27B-NVFP4",
    traps=(
        "transformers ignores mtp.*: a checkpoint it saves has lost its draft layer.",
        "Experts of the trunk are fused in the bf16 release but published per expert in NVFP4.",
        "mlp.gate is in no published ignore list: a quantizer of plain matrices must skip it.",
    ),
)
