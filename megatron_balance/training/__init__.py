"""How a run trains: the loop, its inputs, and when it stops.

run               Run: the objects of a built run
loop              the training loop, one iteration, evaluation, and early ends of a run
progress          counters that checkpoints save, and reports about iterations
objective         the loss of a microbatch, and the weights of predictions' and routers' losses in it
data              data sets, and the samples that each rank reads
data_files        checks of data files and of the flags about them
tokenizer         construction of megatron-core's tokenizers
schedule          batch size, learning rate and weight decay over the run
loss_guard        detection of a NaN or an infinity before the optimizer's step
fault_search      search for its source: rank, layer, expert
optimizer_step    the optimizer's step in two parts, between which the host decides
optimizer_state   the tensors that optimizers keep for a parameter
logging           Megatron's log line, TensorBoard, evaluation results
"""
