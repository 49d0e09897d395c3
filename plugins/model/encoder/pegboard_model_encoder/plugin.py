"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec


def _spec(name: str, *flags: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_encoder.bert:{name}",
        flags=frozenset({"encoder", "tensor_parallel", *flags}),
    )


BERT = _spec("Bert")
BERT_CLASSES = _spec("BertClasses", "classifier")
ROBERTA = _spec("Roberta")
ROBERTA_CLASSES = _spec("RobertaClasses", "classifier")
DISTILBERT = _spec("DistilBert")
DISTILBERT_CLASSES = _spec("DistilBertClasses", "classifier")
