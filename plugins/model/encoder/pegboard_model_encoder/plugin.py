"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec


def _spec(place: str, *flags: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_encoder.{place}",
        flags=frozenset({"encoder", "tensor_parallel", *flags}),
    )


OF_TOKENS = ("classifier", "token_classifier")
BERT = _spec("bert:Bert")
BERT_CLASSES = _spec("bert:BertClasses", "classifier")
BERT_TOKENS = _spec("bert:BertTokens", *OF_TOKENS)
BERT_WORDS = _spec("words:BertWords")
ROBERTA = _spec("bert:Roberta")
ROBERTA_CLASSES = _spec("bert:RobertaClasses", "classifier")
ROBERTA_TOKENS = _spec("bert:RobertaTokens", *OF_TOKENS)
ROBERTA_WORDS = _spec("words:RobertaWords")
DISTILBERT = _spec("bert:DistilBert")
DISTILBERT_CLASSES = _spec("bert:DistilBertClasses", "classifier")
DISTILBERT_TOKENS = _spec("bert:DistilBertTokens", *OF_TOKENS)
DISTILBERT_WORDS = _spec("words:DistilBertWords")
MPNET = _spec("bert:MPNet")
MPNET_CLASSES = _spec("bert:MPNetClasses", "classifier")
MPNET_TOKENS = _spec("bert:MPNetTokens", *OF_TOKENS)
MPNET_WORDS = _spec("words:MPNetWords")
MODERNBERT = _spec("modernbert:ModernBert")
MODERNBERT_CLASSES = _spec("modernbert:ModernBertClasses", "classifier")
MODERNBERT_TOKENS = _spec("modernbert:ModernBertClasses", *OF_TOKENS)
MODERNBERT_WORDS = _spec("words:ModernBertWords")
NOMIC = _spec("gated:Nomic")
NOMIC_CLASSES = _spec("gated:NomicClasses", "classifier")
GTE = _spec("gated:Gte")
GTE_CLASSES = _spec("gated:GteClasses", "classifier")
