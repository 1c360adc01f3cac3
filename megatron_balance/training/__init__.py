"""How a run trains: the loop, its inputs, and when it stops.

run               Run: the objects of a built run
progress          Progress: counters that checkpoints save; StepReport: the report of one iteration
loop              the training loop, one iteration, and evaluation
objective         the loss of a microbatch, and the weights of predictions' and routers' losses in it
reports           completion of reports when the device has finished their iteration
data              data sets, and the samples that each rank reads
data_checks       checks of the data against the flags, by one rank alone
data_files        checks of data files before they are mapped into memory
tokenizer         construction of megatron-core's tokenizers
schedule          batch size, learning rate and weight decay over the run
loss_guard        detection of a NaN or an infinity before the optimizer's step
fault_search      search for its source: rank, layer, expert
optimizer_step    the optimizer's step in two parts, between which the host decides
collection        Python's garbage collection at chosen times
stopping          early end by signal, time limit or iteration
logging           Megatron's log line, TensorBoard, evaluation results
optimizer_state   the tensors that optimizers keep for a parameter
"""
