"""Who says whether a predicted film shows success: networks trained on films, or a vision-language model."""
