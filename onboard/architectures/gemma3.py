"""Gemma 3: five sliding-window layers to one full, four norms a layer, a SigLIP tower from 4B up."""

from onboard.architectures import Architecture, Engine, Role

ARCHITECTURE = Architecture(
    model_types={
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma3_text": "Gemma3ForCausalLM",
    },
    roots={"gemma3": "language_model.", "gemma3_text": ""},
    text_config="text_config",
    tensors="""
    embed      {root}model.embed_tokens.weight                       vocab_size, hidden_size
    norm       {root}model.layers.{layer}.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight  hidden_size
    attention  {root}model.layers.{layer}.self_attn.q_proj.weight    num_attention_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    attention  {root}model.layers.{layer}.self_attn.o_proj.weight    hidden_size, num_attention_heads * head_dim
    norm       {root}model.layers.{layer}.self_attn.{q,k}_norm.weight  head_dim
    mlp        {root}model.layers.{layer}.mlp.{gate,up}_proj.weight  intermediate_size, hidden_size
    mlp        {root}model.layers.{layer}.mlp.down_proj.weight       hidden_size, intermediate_size
    norm       {root}model.norm.weight                               hidden_size
    head       {root}lm_head.weight                                  vocab_size, hidden_size  if not tie_word_embeddings
    vision     vision_tower.vision_model.embeddings.patch_embedding.weight  vision_config.hidden_size, 3, vision_config.patch_size, vision_config.patch_size  if vision_config
    vision     vision_tower.vision_model.embeddings.patch_embedding.bias  vision_config.hidden_size  if vision_config
    vision     vision_tower.vision_model.embeddings.position_embedding.weight  (vision_config.image_size // vision_config.patch_size) ** 2, vision_config.hidden_size  if vision_config
    vision     vision_tower.vision_model.encoder.layers.{block}.layer_norm{1,2}.{weight,bias}  vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.self_attn.{q,k,v,out}_proj.weight  vision_config.hidden_size, vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.self_attn.{q,k,v,out}_proj.bias  vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.weight  vision_config.intermediate_size, vision_config.hidden_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc1.bias  vision_config.intermediate_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.weight  vision_config.hidden_size, vision_config.intermediate_size
    vision     vision_tower.vision_model.encoder.layers.{block}.mlp.fc2.bias  vision_config.hidden_size
    vision     vision_tower.vision_model.post_layernorm.{weight,bias}  vision_config.hidden_size  if vision_config
    vision     multi_modal_projector.mm_input_projection_weight      vision_config.hidden_size, hidden_size  if vision_config
    vision     multi_modal_projector.mm_soft_emb_norm.weight         vision_config.hidden_size  if vision_config
    """,
    # What transformers 5 saves.
    also="""
    embed      model.language_model.embed_tokens.weight              vocab_size, hidden_size
    norm       model.language_model.layers.{layer}.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight  hidden_size
    attention  model.language_model.layers.{layer}.self_attn.{q,k,v,o}_proj.weight  0
    norm       model.language_model.layers.{layer}.self_attn.{q,k}_norm.weight  head_dim
    mlp        model.language_model.layers.{layer}.mlp.{gate,up,down}_proj.weight  0
    norm       model.language_model.norm.weight                      hidden_size
    """,
    # The published configs leave out what is the class's default.
    defaults={
        "vocab_size": "262208",
        "num_attention_heads": "8",
        "num_key_value_heads": "4",
        "head_dim": "256",
        "tie_word_embeddings": "True",
        "vision_config": "None",
    },
    ranges={"block": 'getattr(vision_config, "num_hidden_layers", 0)'},
    # No NVFP4 is published by the vendor; as in nvidia's Gemma 4 lists, attention stays.
    quantize=(Role.MLP,),
    mtp_layers="0",
    # Per token in every layer; sliding layers (five of six) stop growing at sliding_window.
    cache="2 * num_key_value_heads * head_dim",
    small={
        "vocab_size": 262208,
        "num_hidden_layers": 6,
        "vision_config.num_hidden_layers": 2,
        "vision_config.hidden_size": 64,
        "vision_config.intermediate_size": 128,
        "vision_config.num_attention_heads": 2,
        "vision_config.image_size": 56,
        "mm_tokens_per_image": 4,
    },
    engine=Engine(
        minimum="0.8.0",
        tool_call_parser="pythonic",
        cpu="its class is multimodal and needs torchvision, which the CPU engine lacks",
    ),
    origin="transformers 5.24 Gemma3ForConditionalGeneration with its llava conversion; "
    "vLLM 0.32 gemma3_mm.py; google/gemma-3-27b-it",
    traps=(
        "lm_head is the embedding: quantizing it quantizes the input too.",
        "Norm weights are stored as offsets from one (1 + weight).",
        "Text configs leave out heads and widths that equal the class's defaults.",
        "The tower's names lose vision_model inside transformers.",
    ),
)
