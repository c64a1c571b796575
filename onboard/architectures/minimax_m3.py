"""MiniMax-M3: block-sparse attention picked by an indexer, experts, and in most releases vision."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={
        "minimax_m3": None,
        "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    },
    roots={"minimax_m3": "", "minimax_m3_vl": "language_model."},
    text_config="text_config",
    tensors="""
    embed      {root}model.embed_tokens.weight                       vocab_size, hidden_size
    norm       {root}model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  {root}model.layers.{layer}.self_attn.q_proj.weight    num_attention_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, num_attention_heads * head_dim
    norm       {root}model.layers.{layer}.self_attn.{q,k}_norm.weight  head_dim
    indexer    {root}model.layers.{layer}.self_attn.index_q_proj.weight  index_heads * index_dim, hidden_size  if sparse_layers[layer]
    indexer    {root}model.layers.{layer}.self_attn.index_k_proj.weight  index_dim, hidden_size  if sparse_layers[layer]
    norm       {root}model.layers.{layer}.self_attn.index_{q,k}_norm.weight  index_dim  if sparse_layers[layer]
    mlp        {root}model.layers.{layer}.mlp.{gate,up}_proj.weight  dense_intermediate_size, hidden_size  if not moe_layer_freq[layer]
    mlp        {root}model.layers.{layer}.mlp.down_proj.weight       hidden_size, dense_intermediate_size  if not moe_layer_freq[layer]
    router     {root}model.layers.{layer}.block_sparse_moe.gate.weight  num_local_experts, hidden_size  if moe_layer_freq[layer]
    bias       {root}model.layers.{layer}.block_sparse_moe.e_score_correction_bias  num_local_experts  if moe_layer_freq[layer]
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.{expert}.{w1,w3}.weight  intermediate_size, hidden_size  if moe_layer_freq[layer]
    expert     {root}model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight  hidden_size, intermediate_size  if moe_layer_freq[layer]
    shared_expert  {root}model.layers.{layer}.block_sparse_moe.shared_experts.{gate,up}_proj.weight  shared_intermediate_size * n_shared_experts, hidden_size  if moe_layer_freq[layer]
    shared_expert  {root}model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight  hidden_size, shared_intermediate_size * n_shared_experts  if moe_layer_freq[layer]
    norm       {root}model.norm.weight                               hidden_size
    head       {root}lm_head.weight                                  vocab_size, hidden_size  if not tie_word_embeddings
    mtp        {root}model.mtp.layers.{mtp}.{enorm,hnorm,final_layernorm}.weight  hidden_size
    mtp        {root}model.mtp.layers.{mtp}.eh_proj.weight           hidden_size, 2 * hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.{input,post_attention}_layernorm.weight  hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.q_proj.weight  num_attention_heads * head_dim, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.o_proj.weight  hidden_size, num_attention_heads * head_dim
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.{q,k}_norm.weight  head_dim
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.index_q_proj.weight  index_heads * index_dim, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.index_k_proj.weight  index_dim, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.self_attn.index_{q,k}_norm.weight  index_dim
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.gate.weight  num_local_experts, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.e_score_correction_bias  num_local_experts
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.experts.{expert}.{w1,w3}.weight  intermediate_size, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.experts.{expert}.w2.weight  hidden_size, intermediate_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.shared_experts.{gate,up}_proj.weight  shared_intermediate_size * n_shared_experts, hidden_size
    mtp        {root}model.mtp.layers.{mtp}.transformer_layer.block_sparse_moe.shared_experts.down_proj.weight  hidden_size, shared_intermediate_size * n_shared_experts
    vision     vision_tower.vision_model.embeddings.patch_embedding.weight  vision_config.hidden_size, vision_config.num_channels, temporal_patch_size, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     vision_tower.vision_model.pre_layrnorm.{weight,bias}  vision_config.hidden_size  if vision_config
    vision     vision_tower.vision_model.encoder.layers.{block}.layer_norm{1,2}.{weight,bias}  vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.self_attn.{q,k,v,out}_proj.weight  vision_config.hidden_size, vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.self_attn.{q,k,v,out}_proj.bias  vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.weight  vision_config.intermediate_size, vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.bias  vision_config.intermediate_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.weight  vision_config.hidden_size, vision_config.intermediate_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.bias  vision_config.hidden_size
    vision     multi_modal_projector.linear_1.weight                 projector_hidden_size, vision_config.hidden_size  if vision_config
    vision     multi_modal_projector.linear_2.weight                 hidden_size, projector_hidden_size  if vision_config
    vision     patch_merge_mlp.linear_1.weight                       projector_hidden_size, hidden_size * spatial_merge_size ** 2  if vision_config
    vision     patch_merge_mlp.linear_2.weight                       hidden_size, projector_hidden_size  if vision_config
    vision     {multi_modal_projector,patch_merge_mlp}.linear_1.bias  projector_hidden_size  if vision_config
    vision     {multi_modal_projector,patch_merge_mlp}.linear_2.bias  hidden_size  if vision_config
    """,
    # What transformers 5 saves of the mixture of experts, the dense layers and the indexer.
    also="""
    attention  model.language_model.layers.{layer}.self_attn.{q,k,v,o}_proj.weight  0
    indexer    model.language_model.layers.{layer}.self_attn.indexer.{q,k}_proj.weight  0
    mlp        model.language_model.layers.{layer}.mlp.{gate_up,down}_proj.weight  0
    expert     model.language_model.layers.{layer}.mlp.experts.gate_up_proj  num_local_experts, 2 * intermediate_size, hidden_size
    expert     model.language_model.layers.{layer}.mlp.experts.down_proj  num_local_experts, hidden_size, intermediate_size
    """,
    defaults={
        "sparse_attention_config": "None",
        "sparse_layers": 'getattr(sparse_attention_config, "sparse_attention_freq", None)'
        " or [0] * num_hidden_layers",
        "index_heads": 'getattr(sparse_attention_config, "sparse_num_index_heads", 4)',
        "index_dim": 'getattr(sparse_attention_config, "sparse_index_dim", 128)',
        "moe_layer_freq": "[1] * num_hidden_layers",
        "n_shared_experts": "1",
        # The text-only config says 7 modules (of one shared layer) but one layer.
        "num_nextn_predict_layers": "num_mtp_modules",
        "num_mtp_modules": "0",
        "tie_word_embeddings": "False",
        "vision_config": "None",
        "projector_hidden_size": "hidden_size",
        "temporal_patch_size": 'getattr(vision_config, "temporal_patch_size", 2)',
        "spatial_merge_size": 'getattr(vision_config, "spatial_merge_size", 2)',
    },
    ranges={
        "expert": "num_local_experts",
        "mtp": "num_nextn_predict_layers",
        "block": 'getattr(vision_config, "num_hidden_layers", 0)',
    },
    # nvidia/MiniMax-M3-NVFP4 is mixed: routed experts NVFP4; attention, indexer, shared expert and
    # dense layers MXFP8; gate, lm_head, embeddings, vision and projectors stay.
    quantize=(Role.EXPERT,),
    siblings=(
        ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    ),
    fused_experts={"gate_up_proj": Fused(("w1", "w3")), "down_proj": Fused(("w2",))},
    # Sparse layers also keep one fp8 index key per token.
    cache="2 * num_key_value_heads * head_dim + (index_dim if sparse_layers[layer] else 0)",
    small={
        "num_hidden_layers": 4,  # three dense layers, then sparse ones
        "sparse_attention_config.sparse_attention_freq": [0, 0, 0, 1],
        "sparse_attention_config.sparse_disable_index_value": [0, 0, 0, 1],
        "intermediate_size": 64,
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 64,
        "rotary_dim": 16,
        "num_mtp_modules": 1,
        "projector_hidden_size": 128,
        "sparse_attention_config.sparse_index_dim": 32,
        "sparse_attention_config.sparse_num_index_heads": 2,
        "vision_config.num_hidden_layers": 2,
        "vision_config.hidden_size": 96,
        "vision_config.intermediate_size": 128,
        "vision_config.num_attention_heads": 2,
        "vision_config.image_size": 56,
    },
    engine=Engine(
        minimum="0.24.0",
        tool_call_parser="minimax_m3",
        reasoning_parser="minimax_m3",
        cpu="vLLM has no block-sparse attention on CPU",
    ),
    origin="transformers 5.24 MiniMaxM3SparseForConditionalGeneration and its conversion; MTP: "
    "vLLM 0.32 models/minimax_m3/nvidia/mtp.py; NVFP4: nvidia/MiniMax-M3-NVFP4",
    traps=(
        "Serve with --block-size 128: the sparse blocks are pages of the cache.",
        "Experts are w1, w2, w3, but dense layers and the shared expert gate, up, down.",
        "The published ignore list says lm_head, the tensor is language_model.lm_head.",
        "Norm weights are stored as offsets from one (use_gemma_norm).",
        "The activation is clamped (swiglu_limit) and scaled (swiglu_alpha).",
    ),
)
