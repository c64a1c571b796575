"""Dense decoders that publish their weights under Llama's tensor names."""

from onboard.architectures import Architecture, Role

ARCHITECTURE = Architecture(
    model_types={
        "llama": "LlamaForCausalLM",
        "ministral": "MinistralForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    },
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    bias       model.layers.{layer}.self_attn.q_proj.bias            num_attention_heads * head_dim  if qkv_bias
    bias       model.layers.{layer}.self_attn.{k,v}_proj.bias        num_key_value_heads * head_dim  if qkv_bias
    norm       model.layers.{layer}.self_attn.{q,k}_norm.weight      head_dim  if model_type == "qwen3"
    mlp        model.layers.{layer}.mlp.{gate,up}_proj.weight        intermediate_size, hidden_size
    mlp        model.layers.{layer}.mlp.down_proj.weight             hidden_size, intermediate_size
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    """,
    also="""
    bias       model.layers.{layer}.self_attn.o_proj.bias            hidden_size
    bias       model.layers.{layer}.mlp.{gate,up}_proj.bias          intermediate_size
    bias       model.layers.{layer}.mlp.down_proj.bias               hidden_size
    buffer     model.layers.{layer}.self_attn.rotary_emb.inv_freq    head_dim // 2
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
        "tie_word_embeddings": "False",
        "attention_bias": "False",
        "qkv_bias": 'model_type in ("qwen2", "seed_oss") or attention_bias',
    },
    quantize=(Role.ATTENTION, Role.MLP),
    origin="transformers 5.24 LlamaForCausalLM, Qwen3ForCausalLM",
)
