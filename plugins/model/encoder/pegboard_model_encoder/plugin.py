"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec


def _spec(place: str, *flags: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_encoder.{place}",
        flags=frozenset({"encoder", "tensor_parallel", *flags}),
    )


BERT = _spec("bert:Bert")
BERT_CLASSES = _spec("bert:BertClasses", "classifier")
ROBERTA = _spec("bert:Roberta")
ROBERTA_CLASSES = _spec("bert:RobertaClasses", "classifier")
DISTILBERT = _spec("bert:DistilBert")
DISTILBERT_CLASSES = _spec("bert:DistilBertClasses", "classifier")
MPNET = _spec("bert:MPNet")
MPNET_CLASSES = _spec("bert:MPNetClasses", "classifier")
MODERNBERT = _spec("modernbert:ModernBert")
MODERNBERT_CLASSES = _spec("modernbert:ModernBertClasses", "classifier")
NOMIC = _spec("gated:Nomic")
NOMIC_CLASSES = _spec("gated:NomicClasses", "classifier")
GTE = _spec("gated:Gte")
GTE_CLASSES = _spec("gated:GteClasses", "classifier")
