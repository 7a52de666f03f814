// Thread-block clusters as cooperative_groups.h spells them, on the simulator.
#ifndef MOETRT_HOST_COOPERATIVE_GROUPS_H
#define MOETRT_HOST_COOPERATIVE_GROUPS_H

#include "simulator.h"

namespace cooperative_groups {

struct cluster_group {
    static unsigned block_rank() { return gpusim::clusterRank(); }
    static unsigned num_blocks() { return gpusim::clusterSize(); }
    static void barrier_arrive(const gpusim::Location& where = gpusim::Location::current()) {
        gpusim::clusterArrive(where);
    }
    static void barrier_wait(const gpusim::Location& where = gpusim::Location::current()) {
        gpusim::clusterWait(where);
    }
    template <typename T>
    static T* map_shared_rank(T* mine, int rank, const gpusim::Location& where = gpusim::Location::current()) {
        return static_cast<T*>(gpusim::sharedOfCluster(mine, static_cast<unsigned>(rank), where));
    }
};

}  // namespace cooperative_groups

#endif
