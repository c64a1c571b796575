"""LongCat-Flash: two attentions and two dense MLPs a layer, and experts some of which do nothing."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"longcat_flash": "LongcatFlashForCausalLM"},
    # The published config and its names count layers as num_layers. To transformers and engines
    # num_hidden_layers is the number of attentions, twice that; here it is the former.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.{half}.weight  hidden_size
    attention  model.layers.{layer}.self_attn.{half}.q_a_proj.weight  q_lora_rank, hidden_size
    norm       model.layers.{layer}.self_attn.{half}.q_a_layernorm.weight  q_lora_rank
    attention  model.layers.{layer}.self_attn.{half}.q_b_proj.weight  num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank
    attention  model.layers.{layer}.self_attn.{half}.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size
    norm       model.layers.{layer}.self_attn.{half}.kv_a_layernorm.weight  kv_lora_rank
    attention  model.layers.{layer}.self_attn.{half}.kv_b_proj.weight  num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank
    attention  model.layers.{layer}.self_attn.{half}.o_proj.weight   hidden_size, num_attention_heads * v_head_dim
    mlp        model.layers.{layer}.mlps.{half}.{gate,up}_proj.weight  ffn_hidden_size, hidden_size
    mlp        model.layers.{layer}.mlps.{half}.down_proj.weight     hidden_size, ffn_hidden_size
    router     model.layers.{layer}.mlp.router.classifier.weight     n_routed_experts + zero_expert_num, hidden_size
    bias       model.layers.{layer}.mlp.router.e_score_correction_bias  n_routed_experts + zero_expert_num
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  expert_ffn_hidden_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, expert_ffn_hidden_size
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.mtp.embed_tokens.weight                         vocab_size, hidden_size  if num_nextn_predict_layers
    mtp        model.mtp.norm.weight                                 hidden_size  if num_nextn_predict_layers
    mtp        model.mtp.layers.{mtp}.{enorm,hnorm}.m.weight         hidden_size
    mtp        model.mtp.layers.{mtp}.eh_proj.weight                 hidden_size, 2 * hidden_size
    mtp        model.mtp.layers.{mtp}.{input,post_attention}_layernorm.weight  hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.q_a_proj.weight      q_lora_rank, hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.q_a_layernorm.weight  q_lora_rank
    mtp        model.mtp.layers.{mtp}.self_attn.q_b_proj.weight      num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank
    mtp        model.mtp.layers.{mtp}.self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size
    mtp        model.mtp.layers.{mtp}.self_attn.kv_a_layernorm.weight  kv_lora_rank
    mtp        model.mtp.layers.{mtp}.self_attn.kv_b_proj.weight     num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank
    mtp        model.mtp.layers.{mtp}.self_attn.o_proj.weight        hidden_size, num_attention_heads * v_head_dim
    mtp        model.mtp.layers.{mtp}.transformer_layer.mlp.{gate,up}_proj.weight  ffn_hidden_size, hidden_size
    mtp        model.mtp.layers.{mtp}.transformer_layer.mlp.down_proj.weight  hidden_size, ffn_hidden_size
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         n_routed_experts, 2 * expert_ffn_hidden_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            n_routed_experts, hidden_size, expert_ffn_hidden_size
    bias       model.layers.{layer}.mlp.router.classifier.bias       n_routed_experts + zero_expert_num
    bias       model.layers.{layer}.self_attn.{half}.{q_a_proj,kv_a_proj_with_mqa,o_proj}.bias  hidden_size
    buffer     model.layers.{layer}.self_attn.{half}.rotary_emb.inv_freq  qk_rope_head_dim // 2
    """,
    defaults={
        "num_hidden_layers": "num_layers",
        "zero_expert_num": "0",
        "num_nextn_predict_layers": "1",  # not in the published config; one layer is in the files
        "tie_word_embeddings": "False",
    },
    ranges={"half": "2", "expert": "n_routed_experts", "mtp": "num_nextn_predict_layers"},
    # No published list was read for this family. The attention stays as in the other MLA families;
    # routers, lm_head and the MTP layer stay by their roles.
    quantize=(Role.MLP, Role.EXPERT),
    siblings=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    experts_per_token="moe_topk",
    cache="2 * (kv_lora_rank + qk_rope_head_dim)",  # of two attentions
    small={
        "num_layers": 2,
        "head_dim": 64,  # of the rotated part; the published config leaves it out
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "moe_topk": 2,
        "zero_expert_num": 0,  # transformers 5.24 cannot load a model that has some
    },
    engine=Engine(minimum="0.11.0", tool_call_parser="longcat"),
    origin="transformers 5.24 LongcatFlashForCausalLM and its qwen2_moe conversion (experts); MTP "
    "names: vLLM 0.32 longcat_flash_mtp.py; published: 560B",
    traps=(
        "The router scores more experts than there are weights: the last zero_expert_num copy "
        "their input.",
        "The config says num_layers, n_routed_experts, moe_topk, ffn_hidden_size and "
        "expert_ffn_hidden_size where others say num_hidden_layers and so on.",
        "transformers 5.24 sizes gate_up_proj for the zero experts too, which have no weights: the "
        "published checkpoint does not fit its class.",
        "ModelOpt skips the experts without a message: the class lacks num_experts.",
        "vLLM skips names that start with mtp., but the files say model.mtp.",
    ),
)
