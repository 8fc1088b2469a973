// Everything of nn in one header: modules, layers, losses, optimizers, training steps.
//
// Threads: as each of these headers says. Ownership: so. Errors: so.
#ifndef CHORUS_CLIENT_NN_NN_H_
#define CHORUS_CLIENT_NN_NN_H_

#include "chorus/nn/batch_norm.h"                 // IWYU pragma: export
#include "chorus/nn/checkpoint.h"                 // IWYU pragma: export
#include "chorus/nn/conv.h"                       // IWYU pragma: export
#include "chorus/nn/data_parallel.h"              // IWYU pragma: export
#include "chorus/nn/distributed_data_parallel.h"  // IWYU pragma: export
#include "chorus/nn/init.h"                       // IWYU pragma: export
#include "chorus/nn/layers.h"                     // IWYU pragma: export
#include "chorus/nn/loss.h"                       // IWYU pragma: export
#include "chorus/nn/module.h"                     // IWYU pragma: export
#include "chorus/nn/optim.h"                      // IWYU pragma: export
#include "chorus/nn/rnn.h"                        // IWYU pragma: export
#include "chorus/nn/safetensors.h"                // IWYU pragma: export
#include "chorus/nn/sharded_optimizer.h"          // IWYU pragma: export
#include "chorus/nn/shards.h"                     // IWYU pragma: export
#include "chorus/nn/train_step.h"                 // IWYU pragma: export

#endif  // CHORUS_CLIENT_NN_NN_H_
