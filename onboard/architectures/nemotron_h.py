"""Nemotron-H and Nemotron 3: one mixer per layer, Mamba-2, attention, a dense MLP or experts."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"nemotron_h": "NemotronHForCausalLM"},
    # MLPs have no gate: up_proj, squared ReLU, down_proj. With moe_latent_size (Super, Ultra) the
    # experts work in a narrower space between fc1_latent_proj and fc2_latent_proj.
    tensors="""
    embed      backbone.embeddings.weight                            vocab_size, hidden_size
    norm       backbone.layers.{layer}.norm.weight                   hidden_size
    state      backbone.layers.{layer}.mixer.in_proj.weight          2 * inner + 2 * n_groups * ssm_state_size + mamba_num_heads, hidden_size  if kinds[layer] in ("M", "mamba", "linear_attention")
    state      backbone.layers.{layer}.mixer.conv1d.weight           inner + 2 * n_groups * ssm_state_size, 1, conv_kernel  if kinds[layer] in ("M", "mamba", "linear_attention")
    bias       backbone.layers.{layer}.mixer.conv1d.bias             inner + 2 * n_groups * ssm_state_size  if use_conv_bias and kinds[layer] in ("M", "mamba", "linear_attention")
    state      backbone.layers.{layer}.mixer.{A_log,D,dt_bias}       mamba_num_heads  if kinds[layer] in ("M", "mamba", "linear_attention")
    norm       backbone.layers.{layer}.mixer.norm.weight             inner  if kinds[layer] in ("M", "mamba", "linear_attention")
    state      backbone.layers.{layer}.mixer.out_proj.weight         hidden_size, inner  if kinds[layer] in ("M", "mamba", "linear_attention")
    attention  backbone.layers.{layer}.mixer.q_proj.weight           num_attention_heads * head_dim, hidden_size  if kinds[layer] in ("*", "attention", "full_attention")
    attention  backbone.layers.{layer}.mixer.{k,v}_proj.weight       num_key_value_heads * head_dim, hidden_size  if kinds[layer] in ("*", "attention", "full_attention")
    attention  backbone.layers.{layer}.mixer.o_proj.weight           hidden_size, num_attention_heads * head_dim  if kinds[layer] in ("*", "attention", "full_attention")
    mlp        backbone.layers.{layer}.mixer.up_proj.weight          intermediate_size, hidden_size  if kinds[layer] in ("-", "mlp")
    mlp        backbone.layers.{layer}.mixer.down_proj.weight        hidden_size, intermediate_size  if kinds[layer] in ("-", "mlp")
    router     backbone.layers.{layer}.mixer.gate.weight             n_routed_experts, hidden_size  if kinds[layer] in ("E", "moe")
    bias       backbone.layers.{layer}.mixer.gate.e_score_correction_bias  n_routed_experts  if kinds[layer] in ("E", "moe")
    mlp        backbone.layers.{layer}.mixer.fc1_latent_proj.weight  moe_latent_size, hidden_size  if moe_latent_size and kinds[layer] in ("E", "moe")
    mlp        backbone.layers.{layer}.mixer.fc2_latent_proj.weight  hidden_size, moe_latent_size  if moe_latent_size and kinds[layer] in ("E", "moe")
    expert     backbone.layers.{layer}.mixer.experts.{expert}.up_proj.weight  moe_intermediate_size, moe_latent_size or hidden_size  if kinds[layer] in ("E", "moe")
    expert     backbone.layers.{layer}.mixer.experts.{expert}.down_proj.weight  moe_latent_size or hidden_size, moe_intermediate_size  if kinds[layer] in ("E", "moe")
    shared_expert  backbone.layers.{layer}.mixer.shared_experts.up_proj.weight  moe_shared_expert_intermediate_size, hidden_size  if kinds[layer] in ("E", "moe")
    shared_expert  backbone.layers.{layer}.mixer.shared_experts.down_proj.weight  hidden_size, moe_shared_expert_intermediate_size  if kinds[layer] in ("E", "moe")
    norm       backbone.norm_f.weight                                hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        mtp.layers.0.{enorm,hnorm,norm}.weight                hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.0.eh_proj.weight                           hidden_size, 2 * hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.0.mixer.q_proj.weight                      num_attention_heads * head_dim, hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.0.mixer.{k,v}_proj.weight                  num_key_value_heads * head_dim, hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.0.mixer.o_proj.weight                      hidden_size, num_attention_heads * head_dim  if num_nextn_predict_layers
    mtp        mtp.layers.1.{norm,final_layernorm}.weight            hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.gate.weight                        n_routed_experts, hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.gate.e_score_correction_bias       n_routed_experts  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.fc1_latent_proj.weight             moe_latent_size, hidden_size  if moe_latent_size and num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.fc2_latent_proj.weight             hidden_size, moe_latent_size  if moe_latent_size and num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.experts.{expert}.up_proj.weight    moe_intermediate_size, moe_latent_size or hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.experts.{expert}.down_proj.weight  moe_latent_size or hidden_size, moe_intermediate_size  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.shared_experts.up_proj.weight      moe_shared_expert_intermediate_size, hidden_size  if num_nextn_predict_layers
    mtp        mtp.layers.1.mixer.shared_experts.down_proj.weight    hidden_size, moe_shared_expert_intermediate_size  if num_nextn_predict_layers
    """,
    also="""
    expert     backbone.layers.{layer}.mixer.experts.up_proj         n_routed_experts, moe_intermediate_size, moe_latent_size or hidden_size
    expert     backbone.layers.{layer}.mixer.experts.down_proj       n_routed_experts, moe_latent_size or hidden_size, moe_intermediate_size
    bias       backbone.layers.{layer}.mixer.{in,out,q,k,v,o,up,down}_proj.bias  0
    """,
    defaults={
        # One letter per layer in the older configs, one word in the newer ones.
        "layers_block_type": "None",
        "hybrid_override_pattern": "None",
        "kinds": "layers_block_type or hybrid_override_pattern",
        "num_hidden_layers": "len(kinds)",
        "head_dim": "attention_head_dim",
        "inner": "mamba_num_heads * mamba_head_dim",
        "use_conv_bias": "True",
        "moe_latent_size": "0",
        "n_routed_experts": "0",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts"},
    # Nemotron 3 Super and 3.5 Lightning: routed and shared experts NVFP4, Mamba projections FP8;
    # attention, router, latent projections, conv1d, embeddings and MTP stay. Lightning also writes
    # lm_head in W4A16 NVFP4, which we keep. Nemotron 3 Nano quantizes the Mamba projections, but
    # for the six layers before an attention; we keep all, as its successors do. Its list leaves
    # out the router, which transformers holds as a parameter, not as a linear.
    quantize=(Role.MLP, Role.EXPERT, Role.SHARED_EXPERT),
    keep=("*latent_proj.weight",),
    siblings=(("q_proj", "k_proj", "v_proj"),),
    fused_experts={"up_proj": Fused(("up_proj",)), "down_proj": Fused(("down_proj",))},
    # The state of a Mamba layer does not grow with the tokens.
    cache="2 * num_key_value_heads * head_dim"
    ' if kinds[layer] in ("*", "attention", "full_attention") else 0',
    small={
        "moe_shared_expert_intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    engine=Engine(
        minimum="0.12.0",
        tool_call_parser="qwen3_coder",
        reasoning_parser="nemotron_v3",
        cpu="vLLM's CPU experts lack the MLP without a gate",
    ),
    origin="transformers 5.24 NemotronHForCausalLM and its conversion; MTP names: vLLM 0.32 "
    "nemotron_h_mtp.py; NVFP4: nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4, 3.5 Lightning",
    traps=(
        "Newer configs list layers_block_type and give no num_hidden_layers.",
        "Experts have no gate: up_proj and down_proj only, with a squared ReLU.",
        "Speculation must roll back the Mamba state of rejected tokens.",
        "The Mamba state is kept in float32 (mamba_ssm_cache_dtype), batch by batch.",
        "transformers calls the trunk model.*, the files backbone.*.",
    ),
)
