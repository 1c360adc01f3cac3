"""Trains a run: the loop, its inputs, and the conditions to stop.

run               Run: the objects of a built run
loop              the training loop, one iteration, evaluation, and early ends of a run
paired_passes     runs the forward pass of a microbatch together with the backward pass of another
progress          counters that checkpoints save, and reports about iterations
objective         the loss of a microbatch, with weights of the losses of predictions and routers
data              data sets, and the samples that each rank reads
conversations     instruction data, of which only the assistant's tokens have loss
data_files        checks of data files and of their flags
tokenizer         construction of megatron-core's tokenizers
schedule          batch size, learning rate and weight decay over the run
loss_guard        detection of a NaN or an infinity before the optimizer's step
fault_search      search for the rank, layer and expert that caused it
optimizer_step    the optimizer's step in two parts; in between, the host decides whether to step
optimizer_state   the tensors that optimizers keep for a parameter
logging           Megatron's log line, TensorBoard, evaluation results
"""
