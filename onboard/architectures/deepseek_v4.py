"""DeepSeek-V4: attention over compressed tokens, hyper-connections, the first layers hash-routed."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"deepseek_v4": "DeepseekV4ForCausalLM"},
    # compress_ratios has an entry per layer, MTP included: 0 for a sliding window only, 4 for
    # compressed sparse attention with an indexer, 128 for heavily compressed attention. With ratio
    # 4 windows overlap: a compressor is twice as wide. Hyper-connections weigh parallel residual
    # streams for a token, as a router weighs experts. tid2eid routes by the token's id.
    tensors="""
    embed      embed.weight                                          vocab_size, hidden_size
    norm       layers.{layer}.{attn,ffn}_norm.weight                 hidden_size
    router     layers.{layer}.hc_{attn,ffn}_fn                       (2 + hc_mult) * hc_mult, hc_mult * hidden_size
    bias       layers.{layer}.hc_{attn,ffn}_base                     (2 + hc_mult) * hc_mult
    bias       layers.{layer}.hc_{attn,ffn}_scale                    3
    attention  layers.{layer}.attn.wq_a.weight                       q_lora_rank, hidden_size
    norm       layers.{layer}.attn.q_norm.weight                     q_lora_rank
    attention  layers.{layer}.attn.wq_b.weight                       num_attention_heads * head_dim, q_lora_rank
    attention  layers.{layer}.attn.wkv.weight                        head_dim, hidden_size
    norm       layers.{layer}.attn.kv_norm.weight                    head_dim
    bias       layers.{layer}.attn.attn_sink                         num_attention_heads
    attention  layers.{layer}.attn.wo_a.weight                       o_groups * o_lora_rank, num_attention_heads * head_dim // o_groups
    attention  layers.{layer}.attn.wo_b.weight                       hidden_size, o_groups * o_lora_rank
    attention  layers.{layer}.attn.compressor.{wkv,wgate}.weight     head_dim * (2 if compress_ratios[layer] == 4 else 1), hidden_size  if compress_ratios[layer]
    bias       layers.{layer}.attn.compressor.ape                    compress_ratios[layer], head_dim * (2 if compress_ratios[layer] == 4 else 1)  if compress_ratios[layer]
    norm       layers.{layer}.attn.compressor.norm.weight            head_dim  if compress_ratios[layer]
    indexer    layers.{layer}.attn.indexer.wq_b.weight               index_n_heads * index_head_dim, q_lora_rank  if compress_ratios[layer] == 4
    indexer    layers.{layer}.attn.indexer.weights_proj.weight       index_n_heads, hidden_size  if compress_ratios[layer] == 4
    indexer    layers.{layer}.attn.indexer.compressor.{wkv,wgate}.weight  2 * index_head_dim, hidden_size  if compress_ratios[layer] == 4
    bias       layers.{layer}.attn.indexer.compressor.ape            compress_ratios[layer], 2 * index_head_dim  if compress_ratios[layer] == 4
    norm       layers.{layer}.attn.indexer.compressor.norm.weight    index_head_dim  if compress_ratios[layer] == 4
    router     layers.{layer}.ffn.gate.weight                        n_routed_experts, hidden_size
    router     layers.{layer}.ffn.gate.tid2eid                       vocab_size, num_experts_per_tok  if layer < num_hash_layers
    bias       layers.{layer}.ffn.gate.bias                          n_routed_experts  if layer >= num_hash_layers
    expert     layers.{layer}.ffn.experts.{expert}.w{1,3}.weight     moe_intermediate_size, hidden_size
    expert     layers.{layer}.ffn.experts.{expert}.w2.weight         hidden_size, moe_intermediate_size
    shared_expert  layers.{layer}.ffn.shared_experts.w{1,3}.weight   n_shared_experts * moe_intermediate_size, hidden_size
    shared_expert  layers.{layer}.ffn.shared_experts.w2.weight       hidden_size, n_shared_experts * moe_intermediate_size
    norm       norm.weight                                           hidden_size
    router     hc_head_fn                                            hc_mult, hc_mult * hidden_size
    bias       hc_head_base                                          hc_mult
    bias       hc_head_scale                                         1
    head       head.weight                                           vocab_size, hidden_size  if not tie_word_embeddings
    mtp        mtp.{mtp}.{e,h}_proj.weight                           hidden_size, hidden_size
    mtp        mtp.{mtp}.{enorm,hnorm,norm,attn_norm,ffn_norm}.weight  hidden_size
    mtp        mtp.{mtp}.hc_head_fn                                  hc_mult, hc_mult * hidden_size
    mtp        mtp.{mtp}.hc_head_base                                hc_mult
    mtp        mtp.{mtp}.hc_head_scale                               1
    mtp        mtp.{mtp}.hc_{attn,ffn}_fn                            (2 + hc_mult) * hc_mult, hc_mult * hidden_size
    mtp        mtp.{mtp}.hc_{attn,ffn}_base                          (2 + hc_mult) * hc_mult
    mtp        mtp.{mtp}.hc_{attn,ffn}_scale                         3
    mtp        mtp.{mtp}.attn.wq_a.weight                            q_lora_rank, hidden_size
    mtp        mtp.{mtp}.attn.q_norm.weight                          q_lora_rank
    mtp        mtp.{mtp}.attn.wq_b.weight                            num_attention_heads * head_dim, q_lora_rank
    mtp        mtp.{mtp}.attn.wkv.weight                             head_dim, hidden_size
    mtp        mtp.{mtp}.attn.kv_norm.weight                         head_dim
    mtp        mtp.{mtp}.attn.attn_sink                              num_attention_heads
    mtp        mtp.{mtp}.attn.wo_a.weight                            o_groups * o_lora_rank, num_attention_heads * head_dim // o_groups
    mtp        mtp.{mtp}.attn.wo_b.weight                            hidden_size, o_groups * o_lora_rank
    mtp        mtp.{mtp}.ffn.gate.weight                             n_routed_experts, hidden_size
    mtp        mtp.{mtp}.ffn.gate.bias                               n_routed_experts
    mtp        mtp.{mtp}.ffn.experts.{expert}.w{1,3}.weight          moe_intermediate_size, hidden_size
    mtp        mtp.{mtp}.ffn.experts.{expert}.w2.weight              hidden_size, moe_intermediate_size
    mtp        mtp.{mtp}.ffn.shared_experts.w{1,3}.weight            n_shared_experts * moe_intermediate_size, hidden_size
    mtp        mtp.{mtp}.ffn.shared_experts.w2.weight                hidden_size, n_shared_experts * moe_intermediate_size
    """,
    also="""
    expert     layers.{layer}.ffn.experts.gate_up_proj               n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     layers.{layer}.ffn.experts.down_proj                  n_routed_experts, hidden_size, moe_intermediate_size
    mtp        mtp.{mtp}.emb.tok_emb.weight                          vocab_size, hidden_size
    mtp        mtp.{mtp}.head.weight                                 vocab_size, hidden_size
    """,
    defaults={
        "n_shared_experts": "1",
        "num_hash_layers": "0",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts", "mtp": "num_nextn_predict_layers"},
    # nvidia/DeepSeek-V4-Flash-NVFP4 and V4-Pro are mixed: the routed experts of the trunk are
    # NVFP4, attention, shared experts and the MTP layer stay in DeepSeek's block FP8, the rest in
    # bf16. No difference.
    quantize=(Role.EXPERT,),
    siblings=(("wq_a", "wkv"), ("wkv", "wgate"), ("w1", "w3")),
    fused_experts={"gate_up_proj": Fused(("w1", "w3")), "down_proj": Fused(("w2",))},
    keeps_source_format=True,
    # Per `compress_ratios[layer]` tokens one entry: FP8 but for the rotated part in bf16, and 8
    # bytes of scales (584); with an indexer also its key and scale (132). The last `sliding_window`
    # tokens are kept besides, in every layer: a constant, not per token.
    cache="(head_dim + qk_rope_head_dim + 8"
    " + (index_head_dim + index_head_dim // 32 if compress_ratios[layer] == 4 else 0))"
    " / compress_ratios[layer] if compress_ratios[layer] else 0",
    small={
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "head_dim": 64,
    },
    engine=Engine(
        minimum="0.20.0",
        tool_call_parser="deepseek_v4",
        reasoning_parser="deepseek_v4",
        prompt="engine",
        cpu="vLLM's CPU kernels for it need AMX, and leave the MTP layer out",
        eagle3="EAGLE-3: engines define no hidden state of several residual streams",
    ),
    origin="transformers 5.24 DeepseekV4ForCausalLM and the deepseek_v4 conversion; vLLM 0.32 "
    "models/deepseek_v4; shapes and the 35,020 names of V4-Flash as published (69,187 with the "
    "scales); published: V4-Flash 284B, V4-Pro 1.6T, both without the MTP layer",
    traps=(
        "Experts are published in MXFP4 (expert_dtype fp4), the rest in block FP8; scales are "
        "called .scale.",
        "There is no Jinja template: serve with --tokenizer-mode deepseek_v4.",
        "The caches are of several kinds: serve with --block-size 256.",
        "swiglu_limit clamps gate and up: a forward without it measures another model.",
        "tid2eid is int64 and no weight: copy it as it is.",
        "V4-Flash-Vision-Exp and checkpoints with a DSpark draft have tensors that are not here.",
    ),
)
