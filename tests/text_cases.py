"""A tiny text classifier of transformers, and its tokenizer, without a download."""

from transformers import BertConfig, BertTokenizer

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "very", "good", "bad")
LONGEST = 8
CONFIG = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=LONGEST,
    initializer_range=0.3,
    id2label={0: "thumbs down", 1: "thumbs up"},
    label2id={"thumbs down": 0, "thumbs up": 1},
)


def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={word: place for place, word in enumerate(WORDS)})
