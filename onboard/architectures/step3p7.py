"""Step-3.7-Flash: sliding layers with more heads than full ones, gated heads, experts, three MTP
layers, a vision tower."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"step3p7": "Step3p7ForConditionalGeneration"},
    text_config="text_config",
    # Experts are stacked per projection, [E, out, in]. MTP layers follow the trunk, slide, have a
    # dense MLP and an output head each.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{any_layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{any_layer}.self_attn.q_proj.weight      (sliding_heads if kinds[layer] == "sliding_attention" else num_attention_heads) * head_dim, hidden_size
    attention  model.layers.{any_layer}.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{any_layer}.self_attn.o_proj.weight      hidden_size, (sliding_heads if kinds[layer] == "sliding_attention" else num_attention_heads) * head_dim
    attention  model.layers.{any_layer}.self_attn.g_proj.weight      sliding_heads if kinds[layer] == "sliding_attention" else num_attention_heads, hidden_size
    norm       model.layers.{any_layer}.self_attn.{q,k}_norm.weight  head_dim
    mlp        model.layers.{any_layer}.mlp.{gate,up}_proj.weight    intermediate_size, hidden_size  if layer not in moe_layers
    mlp        model.layers.{any_layer}.mlp.down_proj.weight         hidden_size, intermediate_size  if layer not in moe_layers
    router     model.layers.{layer}.moe.gate.weight                  n_routed_experts, hidden_size  if layer in moe_layers
    bias       model.layers.{layer}.moe.router_bias                  n_routed_experts  if layer in moe_layers
    expert     model.layers.{layer}.moe.{gate,up}_proj.weight        n_routed_experts, moe_intermediate_size, hidden_size  if layer in moe_layers
    expert     model.layers.{layer}.moe.down_proj.weight             n_routed_experts, hidden_size, moe_intermediate_size  if layer in moe_layers
    shared_expert  model.layers.{layer}.share_expert.{gate,up}_proj.weight  share_expert_dim, hidden_size  if layer in moe_layers
    shared_expert  model.layers.{layer}.share_expert.down_proj.weight  hidden_size, share_expert_dim  if layer in moe_layers
    mtp        model.layers.{any_layer}.{enorm,hnorm}.weight         hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.eh_proj.weight               hidden_size, 2 * hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.transformer.shared_head.norm.weight  hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.transformer.shared_head.output.weight  vocab_size, hidden_size  if layer >= num_hidden_layers
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    vision     vision_model.conv1.weight                             vision_width, 3, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     vision_model.positional_embedding                     (vision_config.image_size // vision_config.patch_size) ** 2, vision_width  if vision_config
    vision     vision_model.ln_pre.{weight,bias}                     vision_width  if vision_config
    vision     vision_model.transformer.resblocks.{block}.{ln_1,ln_2}.{weight,bias}  vision_width
    vision     vision_model.transformer.resblocks.{block}.{ls_1,ls_2}.gamma  vision_width
    vision     vision_model.transformer.resblocks.{block}.attn.in_proj_weight  3 * vision_width, vision_width
    vision     vision_model.transformer.resblocks.{block}.attn.in_proj_bias  3 * vision_width
    vision     vision_model.transformer.resblocks.{block}.attn.out_proj.weight  vision_width, vision_width
    vision     vision_model.transformer.resblocks.{block}.attn.out_proj.bias  vision_width
    vision     vision_model.transformer.resblocks.{block}.mlp.c_fc.weight  vision_width * vision_ratio // 1, vision_width
    vision     vision_model.transformer.resblocks.{block}.mlp.c_fc.bias  vision_width * vision_ratio // 1
    vision     vision_model.transformer.resblocks.{block}.mlp.c_proj.weight  vision_width, vision_width * vision_ratio // 1
    vision     vision_model.transformer.resblocks.{block}.mlp.c_proj.bias  vision_width
    vision     vision_model.vit_downsampler1.weight                  2 * vision_width, vision_width, 3, 3  if vision_config
    vision     vision_model.vit_downsampler1.bias                    2 * vision_width  if vision_config
    vision     vision_model.vit_downsampler2.weight                  4 * vision_width, 2 * vision_width, 3, 3  if vision_config
    vision     vision_model.vit_downsampler2.bias                    4 * vision_width  if vision_config
    vision     vit_large_projector.weight                            hidden_size, 4 * vision_width  if vision_config
    """,
    # One matrix per expert: what LLM Compressor writes.
    also="""
    expert     model.layers.{layer}.moe.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size
    expert     model.layers.{layer}.moe.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size
    vision     vit_large_projector.bias                              hidden_size
    """,
    # The published config speaks of attention groups and moe_num_experts; others of Hugging Face's.
    defaults={
        "num_attention_groups": "None",
        "num_key_value_heads": "num_attention_groups",
        "moe_num_experts": "None",
        "num_experts": "None",
        "n_routed_experts": "moe_num_experts or num_experts",
        "moe_top_k": "None",
        "num_experts_per_tok": "moe_top_k",
        "attention_other_setting": "None",
        "num_sliding_attention_heads": "None",
        "sliding_heads": "num_sliding_attention_heads or"
        ' getattr(attention_other_setting, "num_attention_heads", num_attention_heads)',
        "num_nextn_predict_layers": "0",
        "kinds": 'layer_types + ["sliding_attention"] * num_nextn_predict_layers',
        "first_k_dense_replace": "3",  # the published moe_layers_enum counts from 3 to the last
        "moe_layers": "range(first_k_dense_replace, num_hidden_layers)",
        "tie_word_embeddings": "False",
        "vision_config": "None",
        "vision_width": 'getattr(vision_config, "width", 0)'
        ' or getattr(vision_config, "hidden_size", 0)',
        "vision_blocks": 'getattr(vision_config, "layers", 0)'
        ' or getattr(vision_config, "num_hidden_layers", 0)',
        "vision_ratio": 'getattr(vision_config, "mlp_ratio", 8960 / 1536)',
    },
    ranges={"expert": "n_routed_experts", "block": "vision_blocks"},
    # No NVFP4 list is at hand; as in its neighbours only the routed experts become NVFP4.
    quantize=(Role.EXPERT,),
    fused_experts={
        "gate_proj": Fused(("gate_proj",)),
        "up_proj": Fused(("up_proj",)),
        "down_proj": Fused(("down_proj",)),
    },
    # Per token in every layer; sliding layers stop growing at sliding_window.
    cache="2 * num_key_value_heads * head_dim",
    small={
        "num_attention_groups": 2,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "attention_other_setting.num_attention_heads": 8,
        "attention_other_setting.num_attention_groups": 2,
        "attention_other_setting.head_dim": 32,
        "vision_config.width": 96,
        "vision_config.layers": 2,
        "vision_config.heads": 2,
        "vision_config.image_size": 56,
        "vision_config.mlp_ratio": 2.0,
    },
    engine=Engine(
        minimum="0.22.0",
        tool_call_parser="step3p5",
        reasoning_parser="step3p5",
        cpu="vLLM's CPU experts lack the sigmoid router without groups",
    ),
    origin="transformers 5.24 Step3p7ForConditionalGeneration and its conversion; MTP names: "
    "vLLM 0.32 step3p5_mtp.py; config: stepfun-ai/Step-3.7-Flash",
    traps=(
        "Sliding layers have 96 query heads, full ones 64 (attention_other_setting).",
        "layer_types has entries for the MTP layers behind those of the trunk.",
        "Each MTP layer has its own output head, unlike the trunk's.",
        "Norm weights are stored as offsets from one (1 + weight).",
        "The last layers clamp their activations (swiglu_limits).",
        "ModelOpt writes this family under wrong tensor names behind one warning.",
    ),
)
