"""Kimi Linear and Kimi K3: gated delta-rule layers (KDA) with latent attention every fourth."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"kimi_linear": "KimiLinearForCausalLM", "kimi_k3": None},
    roots={"kimi_linear": "", "kimi_k3": "language_model."},
    text_config="text_config",
    # linear_attn_config counts layers from 1. Both kinds of layer have a q_proj (where queries are
    # not compressed), o_proj and g_proj: a name alone does not tell which kind, so these, and what
    # is fused with them, are attention; what only a delta rule has is state. The residual mixers
    # of K3 weigh earlier blocks for a token, as a router weighs experts.
    tensors="""
    embed      {root}model.embed_tokens.weight                       vocab_size, hidden_size
    norm       {root}model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    norm       {root}model.layers.{layer}.{self_attention,mlp}_res_norm.weight  hidden_size  if attn_res_block_size
    router     {root}model.layers.{layer}.{self_attention,mlp}_res_proj.weight  1, hidden_size  if attn_res_block_size
    attention  {root}model.layers.{layer}.self_attn.{q,k,v}_proj.weight  kda_size, hidden_size  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.{q,k,v}_conv1d.weight  kda_size, 1, linear_attn_config.short_conv_kernel_size  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.f_a_proj.weight  linear_attn_config.head_dim, hidden_size  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.f_b_proj.weight  kda_size, linear_attn_config.head_dim  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.b_proj.weight    linear_attn_config.num_heads, hidden_size  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.A_log            1, 1, linear_attn_config.num_heads, 1  if layer + 1 in linear_attn_config.kda_layers and not kda_full_gate
    state      {root}model.layers.{layer}.self_attn.A_log            -(-linear_attn_config.num_heads // 128) * 128  if layer + 1 in linear_attn_config.kda_layers and kda_full_gate
    state      {root}model.layers.{layer}.self_attn.dt_bias          kda_size  if layer + 1 in linear_attn_config.kda_layers
    state      {root}model.layers.{layer}.self_attn.g_a_proj.weight  linear_attn_config.head_dim, hidden_size  if layer + 1 in linear_attn_config.kda_layers and not kda_full_gate
    state      {root}model.layers.{layer}.self_attn.g_b_proj.weight  kda_size, linear_attn_config.head_dim  if layer + 1 in linear_attn_config.kda_layers and not kda_full_gate
    attention  {root}model.layers.{layer}.self_attn.g_proj.weight    kda_size, hidden_size  if layer + 1 in linear_attn_config.kda_layers and kda_full_gate
    norm       {root}model.layers.{layer}.self_attn.o_norm.weight    linear_attn_config.head_dim  if layer + 1 in linear_attn_config.kda_layers
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, kda_size  if layer + 1 in linear_attn_config.kda_layers
    attention  {root}model.layers.{layer}.self_attn.q_proj.weight    num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), hidden_size  if layer + 1 in linear_attn_config.full_attn_layers and not q_lora_rank
    attention  {root}model.layers.{layer}.self_attn.q_a_proj.weight  q_lora_rank, hidden_size  if layer + 1 in linear_attn_config.full_attn_layers and q_lora_rank
    norm       {root}model.layers.{layer}.self_attn.q_a_layernorm.weight  q_lora_rank  if layer + 1 in linear_attn_config.full_attn_layers and q_lora_rank
    attention  {root}model.layers.{layer}.self_attn.q_b_proj.weight  num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank  if layer + 1 in linear_attn_config.full_attn_layers and q_lora_rank
    attention  {root}model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size  if layer + 1 in linear_attn_config.full_attn_layers
    norm       {root}model.layers.{layer}.self_attn.kv_a_layernorm.weight  kv_lora_rank  if layer + 1 in linear_attn_config.full_attn_layers
    attention  {root}model.layers.{layer}.self_attn.kv_b_proj.weight  num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank  if layer + 1 in linear_attn_config.full_attn_layers
    attention  {root}model.layers.{layer}.self_attn.g_proj.weight    num_attention_heads * v_head_dim, hidden_size  if layer + 1 in linear_attn_config.full_attn_layers and mla_use_output_gate
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, num_attention_heads * v_head_dim  if layer + 1 in linear_attn_config.full_attn_layers
    mlp        {root}model.layers.{layer}.mlp.{gate,up}_proj.weight  intermediate_size, hidden_size  if layer < first_k_dense_replace
    mlp        {root}model.layers.{layer}.mlp.down_proj.weight       hidden_size, intermediate_size  if layer < first_k_dense_replace
    router     {root}model.layers.{layer}.block_sparse_moe.gate.weight  num_experts, hidden_size  if layer >= first_k_dense_replace
    bias       {root}model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias  num_experts  if layer >= first_k_dense_replace
    mlp        {root}model.layers.{layer}.block_sparse_moe.routed_expert_down_proj.weight  routed_expert_hidden_size, hidden_size  if layer >= first_k_dense_replace and routed_expert_hidden_size
    norm       {root}model.layers.{layer}.block_sparse_moe.routed_expert_norm.weight  routed_expert_hidden_size  if layer >= first_k_dense_replace and routed_expert_hidden_size and latent_moe_use_norm
    mlp        {root}model.layers.{layer}.block_sparse_moe.routed_expert_up_proj.weight  hidden_size, routed_expert_hidden_size  if layer >= first_k_dense_replace and routed_expert_hidden_size
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.{expert}.w{1,3}.weight  moe_intermediate_size, expert_width  if layer >= first_k_dense_replace
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight  expert_width, moe_intermediate_size  if layer >= first_k_dense_replace
    shared_expert  {root}model.layers.{layer}.block_sparse_moe.shared_experts.{gate,up}_proj.weight  num_shared_experts * moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace
    shared_expert  {root}model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight  hidden_size, num_shared_experts * moe_intermediate_size  if layer >= first_k_dense_replace
    norm       {root}model.norm.weight                               hidden_size
    norm       {root}model.output_attn_res_norm.weight               hidden_size  if attn_res_block_size
    router     {root}model.output_attn_res_proj.weight               1, hidden_size  if attn_res_block_size
    head       {root}lm_head.weight                                  vocab_size, hidden_size  if not tie_word_embeddings
    vision     vision_tower.patch_embed.proj.weight                  vision_config.vt_hidden_size, 3, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     vision_tower.patch_embed.pos_emb.weight               vision_config.init_pos_emb_height, vision_config.init_pos_emb_width, vision_config.vt_hidden_size  if vision_config
    vision     vision_tower.encoder.blocks.{block}.norm{0,1}.weight  vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wqkv.weight       3 * vision_config.qkv_hidden_size, vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.wo.weight         vision_config.vt_hidden_size, vision_config.qkv_hidden_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc0.weight    vision_config.vt_intermediate_size, vision_config.vt_hidden_size
    vision     vision_tower.encoder.blocks.{block}.mlp.fc1.weight    vision_config.vt_hidden_size, vision_config.vt_intermediate_size
    vision     vision_tower.encoder.final_layernorm.weight           vision_config.vt_hidden_size  if vision_config
    vision     mm_projector.proj.0.weight                            merged, merged  if vision_config
    vision     mm_projector.proj.2.weight                            hidden_size, merged  if vision_config
    vision     mm_projector.post_norm.weight                         hidden_size  if vision_config
    """,
    also="""
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.gate_up_proj  num_experts, 2 * moe_intermediate_size, expert_width
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.down_proj  num_experts, expert_width, moe_intermediate_size
    mtp        {root}model.layers.{layer}.eh_proj.weight             hidden_size, 2 * hidden_size
    mtp        {root}model.layers.{layer}.{enorm,hnorm,shared_head.norm}.weight  hidden_size
    vision     mm_projector.linear_{1,2}.weight                      hidden_size
    """,
    defaults={
        "q_lora_rank": "None",
        "mla_use_output_gate": "False",
        "first_k_dense_replace": "0",
        "attn_res_block_size": "None",
        "routed_expert_hidden_size": "0",
        "expert_width": "routed_expert_hidden_size or hidden_size",
        "latent_moe_use_norm": "False",
        "kda_size": "linear_attn_config.num_heads * linear_attn_config.head_dim",
        "kda_full_gate": 'getattr(linear_attn_config, "use_full_rank_gate", False)',
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
        "vision_config": "None",
        "merged": "vision_config and vision_config.merge_kernel_size[0]"
        " * vision_config.merge_kernel_size[1] * vision_config.mm_hidden_size",
    },
    ranges={
        "expert": "num_experts",
        "block": "vision_config and vision_config.vt_num_hidden_layers",
    },
    # Moonshot's own MXFP4 list of K3, the only published one read, leaves the routed experts alone
    # to be quantized. It does not name the two latent projections around them, nor routers and
    # residual mixers, but their weights are bf16 in the files: the first are kept by name, the
    # others by their role.
    quantize=(Role.EXPERT,),
    keep=("*.routed_expert_*_proj.*",),
    siblings=(
        ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    ),
    fused_experts={"gate_up_proj": Fused(("w1", "w3")), "down_proj": Fused(("w2",))},
    experts_per_token="num_experts_per_token",
    # The recurrent state of a linear layer does not grow with the tokens.
    cache="kv_lora_rank + qk_rope_head_dim if layer + 1 in linear_attn_config.full_attn_layers else 0",
    small={
        "num_hidden_layers": 4,
        "num_experts_per_token": 2,
        "num_key_value_heads": 4,
        "linear_attn_config.num_heads": 4,
        "linear_attn_config.head_dim": 32,
        "linear_attn_config.kda_layers": [1, 2, 3],
        "linear_attn_config.full_attn_layers": [4],
        "vision_config.vt_num_hidden_layers": 1,
        "vision_config.vt_hidden_size": 64,
        "vision_config.mm_hidden_size": 64,
        "vision_config.qkv_hidden_size": 192,
        "vision_config.vt_intermediate_size": 64,
        "vision_config.text_hidden_size": 128,
    },
    engine=Engine(
        minimum="0.27.0",
        tool_call_parser="kimi_k3",
        reasoning_parser="kimi_k3",
        prompt="engine",
        cpu="vLLM's delta-rule (KDA) layers have Triton kernels only",
    ),
    origin="transformers 5.24 KimiLinearForCausalLM and the kimi_linear conversion; K3: vLLM 0.32 "
    "models/kimi_k3 and kimi_k25_vit.py, and its index of 497,220 tensors (two per MXFP4 expert "
    "matrix); published: Kimi-Linear 48B, K3 2.8T",
    traps=(
        "K3 is unknown to transformers, and its experts are MXFP4 (compressed-tensors).",
        "K3 stores A_log padded with zeros to 128 heads, Kimi-Linear as [1, 1, heads, 1].",
        "No MTP layer: speculation needs a separate draft, and the engine must roll states back.",
        "Kimi-Linear, the text-only model, has a Jinja template and calls tools in kimi_k2's format.",
    ),
)
