"""gpt-oss: alternating sliding-window and full attention with sinks, experts with biases, MXFP4."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"gpt_oss": "GptOssForCausalLM"},
    # Experts as transformers holds them, [E, in, out]; the published MXFP4 blocks store the codes
    # of the same tensors outputs first.
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    bias       model.layers.{layer}.self_attn.q_proj.bias            num_attention_heads * head_dim  if attention_bias
    bias       model.layers.{layer}.self_attn.{k,v}_proj.bias        num_key_value_heads * head_dim  if attention_bias
    bias       model.layers.{layer}.self_attn.o_proj.bias            hidden_size  if attention_bias
    attention  model.layers.{layer}.self_attn.sinks                  num_attention_heads
    router     model.layers.{layer}.mlp.router.weight                num_local_experts, hidden_size
    bias       model.layers.{layer}.mlp.router.bias                  num_local_experts
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         num_local_experts, hidden_size, 2 * intermediate_size
    bias       model.layers.{layer}.mlp.experts.gate_up_proj_bias    num_local_experts, 2 * intermediate_size
    expert     model.layers.{layer}.mlp.experts.down_proj            num_local_experts, intermediate_size, hidden_size
    bias       model.layers.{layer}.mlp.experts.down_proj_bias       num_local_experts, hidden_size
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, intermediate_size
    bias       model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.bias  intermediate_size
    bias       model.layers.{layer}.mlp.experts.{expert}.down_proj.bias  hidden_size
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "attention_bias": "True",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "num_local_experts"},
    # No NVFP4 is published; the MXFP4 of the source leaves attention, router, embeddings and
    # lm_head alone (modules_to_not_convert), and so do we.
    quantize=(Role.EXPERT,),
    # Outputs of gate_up_proj and its bias alternate: gate 0, up 0, gate 1, up 1, ...
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj"), axes="eio", interleaved=True),
        "down_proj": Fused(("down_proj",), axes="eio"),
    },
    mtp_layers="0",
    # Per token in every layer; layers of sliding_attention stop growing at sliding_window.
    cache="2 * num_key_value_heads * head_dim",
    engine=Engine(
        minimum="0.10.1",
        tool_call_parser="openai",
        reasoning_parser="openai_gptoss",
        prompt="engine",  # Harmony, which vLLM encodes itself
        cpu="the CPU emulation of NVFP4 experts lacks the clamped SwiGLU with biases",
    ),
    origin="transformers 5.24 GptOssForCausalLM; stored layout: openai/gpt-oss-120b; "
    "vLLM 0.32 gpt_oss.py",
    traps=(
        "Gate and up rows are interleaved, not stacked.",
        "Experts have biases; the activation is clamped at swiglu_limit with an alpha of 1.702.",
        "NVFP4 of this family did not load in vLLM when read.",
        "The attention sinks are one logit per head, without which outputs are plausible but wrong.",
        "bf16 copies hold the experts as [E, in, out], the MXFP4 source as [E, out, in].",
    ),
)
