// Answers every JointState with a JointTrajectory of one point, over the C library of Cyclone DDS.
// usage: cyclone_echo DOMAIN
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dds/dds.h"
#include "messages.h"

static dds_entity_t checked(dds_entity_t entity, const char *what) {
  if (entity < 0) {
    fprintf(stderr, "%s: %s\n", what, dds_strretcode(-entity));
    exit(1);
  }
  return entity;
}

int main(int count, char **arguments) {
  if (count != 2) return 2;
  dds_entity_t participant = checked(dds_create_participant((dds_domainid_t)atoi(arguments[1]), NULL, NULL), "join");
  // The qualities of a ROS 2 node with default settings.
  dds_qos_t *quality = dds_create_qos();
  dds_qset_reliability(quality, DDS_RELIABILITY_RELIABLE, DDS_MSECS(100));
  dds_qset_durability(quality, DDS_DURABILITY_VOLATILE);
  dds_qset_history(quality, DDS_HISTORY_KEEP_LAST, 10);
  dds_entity_t states = checked(
      dds_create_topic(participant, &sensor_msgs_msg_dds__JointState__desc, "rt/joint_states", NULL, NULL), "states");
  dds_entity_t commands = checked(dds_create_topic(participant, &trajectory_msgs_msg_dds__JointTrajectory__desc,
                                                   "rt/arm/joint_trajectory", NULL, NULL), "commands");
  dds_entity_t reader = checked(dds_create_reader(participant, states, quality, NULL), "reader");
  dds_entity_t writer = checked(dds_create_writer(participant, commands, quality, NULL), "writer");
  dds_entity_t wait = checked(dds_create_waitset(participant), "wait");
  dds_entity_t arrived = checked(dds_create_readcondition(reader, DDS_ANY_STATE), "condition");
  checked(dds_waitset_attach(wait, arrived, 0), "attach");
  printf("ready\n");
  fflush(stdout);
  for (;;) {
    dds_attach_t cause;
    if (dds_waitset_wait(wait, &cause, 1, DDS_SECS(1)) <= 0) continue;
    void *samples[1] = {NULL};
    dds_sample_info_t info[1];
    while (dds_take(reader, samples, info, 1, 1) > 0) {
      if (info[0].valid_data) {
        const sensor_msgs_msg_dds__JointState_ *state = samples[0];
        trajectory_msgs_msg_dds__JointTrajectoryPoint_ point;
        memset(&point, 0, sizeof point);
        point.positions = state->position;
        point.velocities = state->velocity;
        point.time_from_start.nanosec = 20000000;
        trajectory_msgs_msg_dds__JointTrajectory_ command;
        memset(&command, 0, sizeof command);
        command.header = state->header;
        command.joint_names._length = state->name._length;
        command.joint_names._buffer = state->name._buffer;
        command.points._length = 1;
        command.points._buffer = &point;
        dds_write(writer, &command);
      }
      dds_return_loan(reader, samples, 1);
      samples[0] = NULL;
    }
  }
}
