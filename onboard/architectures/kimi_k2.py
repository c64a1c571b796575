"""Kimi K2, and K2.5 and later: DeepSeek-V3's decoder, in K2.5 behind the vision tower MoonViT."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    # K2 comes with its own code, and its model_type is unknown to transformers.
    model_types={"kimi_k2": None, "kimi_k25": "Kimi_K25ForConditionalGeneration"},
    roots={"kimi_k2": "", "kimi_k25": "language_model."},
    text_config="text_config",
    tensors="""
    embed      {root}model.embed_tokens.weight                       vocab_size, hidden_size
    norm       {root}model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  {root}model.layers.{layer}.self_attn.q_a_proj.weight  q_lora_rank, hidden_size
    norm       {root}model.layers.{layer}.self_attn.q_a_layernorm.weight  q_lora_rank
    attention  {root}model.layers.{layer}.self_attn.q_b_proj.weight  num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank
    attention  {root}model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size
    norm       {root}model.layers.{layer}.self_attn.kv_a_layernorm.weight  kv_lora_rank
    attention  {root}model.layers.{layer}.self_attn.kv_b_proj.weight  num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, num_attention_heads * v_head_dim
    mlp        {root}model.layers.{layer}.mlp.{gate,up}_proj.weight  intermediate_size, hidden_size  if layer < first_k_dense_replace
    mlp        {root}model.layers.{layer}.mlp.down_proj.weight       hidden_size, intermediate_size  if layer < first_k_dense_replace
    router     {root}model.layers.{layer}.mlp.gate.weight            n_routed_experts, hidden_size  if layer >= first_k_dense_replace
    bias       {root}model.layers.{layer}.mlp.gate.e_score_correction_bias  n_routed_experts  if layer >= first_k_dense_replace
    expert     {root}model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace
    expert     {root}model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer >= first_k_dense_replace
    shared_expert  {root}model.layers.{layer}.mlp.shared_experts.{gate,up}_proj.weight  n_shared_experts * moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace
    shared_expert  {root}model.layers.{layer}.mlp.shared_experts.down_proj.weight  hidden_size, n_shared_experts * moe_intermediate_size  if layer >= first_k_dense_replace
    norm       {root}model.norm.weight                               hidden_size
    head       {root}lm_head.weight                                  vocab_size, hidden_size  if not tie_word_embeddings
    vision     vision_tower.patch_embed.proj.weight                  vision_config.vt_hidden_size, 3, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     vision_tower.patch_embed.proj.bias                    vision_config.vt_hidden_size  if vision_config
    vision     vision_tower.patch_embed.pos_emb.weight               vision_config.init_pos_emb_height, vision_config.init_pos_emb_width, vision_config.vt_hidden_size  if vision_config
    vision     vision_tower.encoder.blocks.{block}.norm{0,1}.{weight,bias}  vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wqkv.weight       3 * vision_config.vt_hidden_size, vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wqkv.bias         3 * vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wo.weight         vision_config.vt_hidden_size, vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wo.bias           vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc0.weight    vision_config.vt_intermediate_size, vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc0.bias      vision_config.vt_intermediate_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc1.weight    vision_config.vt_hidden_size, vision_config.vt_intermediate_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc1.bias      vision_config.vt_hidden_size
    vision     vision_tower.encoder.final_layernorm.{weight,bias}    vision_config.vt_hidden_size  if vision_config
    vision     mm_projector.pre_norm.{weight,bias}                   vision_config.mm_hidden_size  if vision_config
    vision     mm_projector.proj.0.weight                            merged, merged  if vision_config
    vision     mm_projector.proj.0.bias                              merged  if vision_config
    vision     mm_projector.proj.2.weight                            hidden_size, merged  if vision_config
    vision     mm_projector.proj.2.bias                              hidden_size  if vision_config
    """,
    also="""
    expert     {root}model.layers.{layer}.mlp.experts.gate_up_proj   n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     {root}model.layers.{layer}.mlp.experts.down_proj      n_routed_experts, hidden_size, moe_intermediate_size
    buffer     {root}model.layers.{layer}.self_attn.rotary_emb.inv_freq  qk_rope_head_dim // 2
    vision     mm_projector.linear_{1,2}.{weight,bias}               hidden_size
    """,
    defaults={
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
        "vision_config": "None",
        "merged": "vision_config and vision_config.merge_kernel_size[0]"
        " * vision_config.merge_kernel_size[1] * vision_config.mm_hidden_size",
    },
    ranges={
        "expert": "n_routed_experts",
        "block": "vision_config and vision_config.vt_num_hidden_layers",
    },
    # nvidia/Kimi-K2.6-NVFP4 and K2.7-Code quantize the routed experts and nothing else.
    # K2.5-NVFP4, the first, also took the dense MLP and the shared experts: the later choice is
    # followed here. No list names the routers: they were no nn.Linear to the quantizer. They stay
    # here by their role.
    quantize=(Role.EXPERT,),
    siblings=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # One latent vector and one rotated key for all heads; no scales per token in plain FP8.
    cache="kv_lora_rank + qk_rope_head_dim",
    # transformers does not read the vt_ keys: the width of its tower is fixed, and stays.
    small={
        "num_key_value_heads": 4,
        "vision_config.vt_num_hidden_layers": 1,
        "vision_config.num_hidden_layers": 1,
        "vision_config.vt_intermediate_size": 64,
        "vision_config.intermediate_size": 64,
    },
    engine=Engine(
        minimum="0.19.1",
        tool_call_parser="kimi_k2",
        reasoning_parser="kimi_k2",
        cpu="its class is multimodal and needs torchvision, which the CPU engine lacks",
    ),
    origin="transformers 5.24 Kimi_K25ForConditionalGeneration, DeepseekV3ForCausalLM and the "
    "kimi_k25 conversion; vLLM 0.32 kimi_k25.py, kimi_k25_vit.py; published: 1T, no MTP layer",
    traps=(
        "K2-Instruct is block FP8; K2-Thinking and K2.5 and later are INT4 (compressed-tensors).",
        "The model_type kimi_k2 is unknown to transformers; the Hub code needs trust_remote_code.",
        "K2-Instruct does not reason: leave --reasoning-parser out.",
        "The published config names the tower's sizes vt_*, which transformers 5 ignores: it builds "
        "its defaults.",
    ),
)
