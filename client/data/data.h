// Everything of data in one header: datasets, samplers, loaders, readers, a progress bar, plots.
//
// Threads: as each of these headers says. Ownership: so. Errors: so.
#ifndef CHORUS_CLIENT_DATA_DATA_H_
#define CHORUS_CLIENT_DATA_DATA_H_

#include "chorus/data/dataset.h"       // IWYU pragma: export
#include "chorus/data/idx.h"           // IWYU pragma: export
#include "chorus/data/loader.h"        // IWYU pragma: export
#include "chorus/data/numpy.h"         // IWYU pragma: export
#include "chorus/data/plot.h"          // IWYU pragma: export
#include "chorus/data/progress_bar.h"  // IWYU pragma: export
#include "chorus/data/sampler.h"       // IWYU pragma: export

#endif  // CHORUS_CLIENT_DATA_DATA_H_
