"""Llama 4: chunked attention, top-1 experts in every n-th layer, a vision tower."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={
        "llama4": "Llama4ForConditionalGeneration",
        "llama4_text": "Llama4ForCausalLM",
    },
    roots={"llama4": "language_model.", "llama4_text": ""},
    text_config="text_config",
    # Fused experts are stored [E, in, out], unlike every other family's.
    tensors="""
    embed      {root}model.embed_tokens.weight                       vocab_size, hidden_size
    norm       {root}model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  {root}model.layers.{layer}.self_attn.q_proj.weight    num_attention_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, num_attention_heads * head_dim
    router     {root}model.layers.{layer}.feed_forward.router.weight  num_local_experts, hidden_size  if layer in moe_layers
    expert     {root}model.layers.{layer}.feed_forward.experts.gate_up_proj  num_local_experts, hidden_size, 2 * intermediate_size  if layer in moe_layers
    expert     {root}model.layers.{layer}.feed_forward.experts.down_proj  num_local_experts, intermediate_size, hidden_size  if layer in moe_layers
    shared_expert  {root}model.layers.{layer}.feed_forward.shared_expert.{gate,up}_proj.weight  intermediate_size, hidden_size  if layer in moe_layers
    shared_expert  {root}model.layers.{layer}.feed_forward.shared_expert.down_proj.weight  hidden_size, intermediate_size  if layer in moe_layers
    mlp        {root}model.layers.{layer}.feed_forward.{gate,up}_proj.weight  intermediate_size_mlp, hidden_size  if layer not in moe_layers
    mlp        {root}model.layers.{layer}.feed_forward.down_proj.weight  hidden_size, intermediate_size_mlp  if layer not in moe_layers
    norm       {root}model.norm.weight                               hidden_size
    head       {root}lm_head.weight                                  vocab_size, hidden_size  if not tie_word_embeddings
    vision     vision_model.class_embedding                          vision_width  if vision_layers
    vision     vision_model.positional_embedding_vlm                 vision_patches + 1, vision_width  if vision_layers
    vision     vision_model.patch_embedding.linear.weight            vision_width, 3 * vision_patch ** 2  if vision_layers
    vision     vision_model.layernorm_{pre,post}.{weight,bias}       vision_width  if vision_layers
    vision     vision_model.model.layers.{block}.{input,post_attention}_layernorm.{weight,bias}  vision_width
    vision     vision_model.model.layers.{block}.self_attn.{q,k,v,o}_proj.weight  vision_width, vision_width
    vision     vision_model.model.layers.{block}.self_attn.{q,k,v,o}_proj.bias  vision_width
    vision     vision_model.model.layers.{block}.mlp.fc1.weight      vision_inner, vision_width
    vision     vision_model.model.layers.{block}.mlp.fc1.bias        vision_inner
    vision     vision_model.model.layers.{block}.mlp.fc2.weight      vision_width, vision_inner
    vision     vision_model.model.layers.{block}.mlp.fc2.bias        vision_width
    vision     vision_model.vision_adapter.mlp.fc1.weight            adapter_width, vision_inner  if vision_layers
    vision     vision_model.vision_adapter.mlp.fc2.weight            adapter_output, adapter_output  if vision_layers
    vision     multi_modal_projector.linear_1.weight                 hidden_size, vision_output  if vision_layers
    """,
    # One matrix per expert: what the NVFP4 and FP8 releases hold.
    also="""
    expert     {root}model.layers.{layer}.feed_forward.experts.{expert}.{gate,up}_proj.weight  intermediate_size, hidden_size
    expert     {root}model.layers.{layer}.feed_forward.experts.{expert}.down_proj.weight  hidden_size, intermediate_size
    buffer     {root}model.rotary_emb.inv_freq                       0
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "moe_layers": "range(interleave_moe_layer_step - 1, num_hidden_layers,"
        " interleave_moe_layer_step)",
        "tie_word_embeddings": "False",
        # A config of the multimodal class without a vision_config has the default tower.
        "vision_config": "None",
        "vision_layers": 'getattr(vision_config, "num_hidden_layers", 34)'
        ' if config["model_type"] == "llama4" else 0',
        "vision_width": 'getattr(vision_config, "hidden_size", 768)',
        "vision_inner": 'getattr(vision_config, "intermediate_size", 5632)',
        "vision_patch": 'getattr(vision_config, "patch_size", 14)',
        "vision_patches": '(getattr(vision_config, "image_size", 448) // vision_patch) ** 2',
        "adapter_width": 'getattr(vision_config, "projector_input_dim", 4096)',
        "adapter_output": 'getattr(vision_config, "projector_output_dim", 4096)',
        "vision_output": 'getattr(vision_config, "vision_output_dim", 7680)',
    },
    ranges={"expert": "num_local_experts", "block": "vision_layers"},
    # nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4 keeps routers, vision, projector and lm_head.
    quantize=(Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj"), axes="eio"),
        "down_proj": Fused(("down_proj",), axes="eio"),
    },
    mtp_layers="0",
    # Per token in every layer; three of four layers attend to the last attention_chunk_size only.
    cache="2 * num_key_value_heads * head_dim",
    small={
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "vision_config.num_hidden_layers": 2,
        "vision_config.hidden_size": 64,
        "vision_config.intermediate_size": 256,
        "vision_config.num_attention_heads": 2,
        "vision_config.image_size": 56,
        "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64,
        "vision_config.vision_output_dim": 64,
    },
    engine=Engine(
        minimum="0.8.3",
        tool_call_parser="llama4_pythonic",
        cpu="its class is multimodal and needs torchvision, which the CPU engine lacks",
    ),
    origin="transformers 5.24 Llama4ForConditionalGeneration; vLLM 0.32 llama4.py, mllama4.py",
    traps=(
        "Fused experts are [E, in, out]: blocks of 16 run along the middle dimension.",
        "One fused tensor is 21 GB in Maverick: slice it, never load it whole.",
        "intermediate_size is an expert's width, intermediate_size_mlp a dense layer's.",
        "vLLM permutes q_proj and k_proj when it loads them: scales must follow the rows.",
        "The router's weight scales an expert's input, not its output.",
        "transformers 5.24's multimodal class fails on text alone (image_outputs): call its"
        " language_model.",
    ),
)
